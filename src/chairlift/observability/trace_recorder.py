"""Records what was served as a workload that can be served again: lengths, times and which beginnings were equal."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from chairlift.errors import ConfigError
from chairlift.events import Event, RequestFinished
from chairlift.request import Request

logger = logging.getLogger("chairlift")

DIGEST_BYTES: Final = 8
HASH_BLOCK_SIZE: Final = 16
"""Prompt tokens for each hash."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A request that has not ended."""

    time: float
    num_prompt_tokens: int
    prompt_hashes: list[str]
    max_tokens: int
    priority: int


class TraceRecorder:
    """Writes the requests of a served session to `path`, in the format `chairlift`, each when it has ended.

    Neither text nor tokens nor the ids of requests are written. Equal beginnings of prompts are known by the hashes of
    their blocks of 16 tokens, each chained to the one before and keyed with random bytes that are written nowhere: they
    can be compared with one another, and not with hashes of guessed prompts. Times count from the first request.

    Replayed outputs are other tokens than the recorded ones, so of a conversation that sends answers back, the hits on
    earlier prompts are found again, and those on earlier answers are not.

    Calls may come from any thread. The file is complete after `close`, which leaves out requests that have not ended.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | str) -> None:
        try:
            self._file = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"trace {path}: cannot be written ({error.strerror or error})") from None
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._unfinished: dict[str, _Arrival] = {}
        self._start: float | None = None
        self._num_left_out = 0

    def arrived(
        self, request_id: str, prompt_token_ids: Sequence[int], max_tokens: int, now: float, priority: int = 0
    ) -> None:
        """A request came at `now`, in seconds of any clock; its id must not be that of one that has not ended."""
        hashes = _block_hashes(self._key, prompt_token_ids)
        with self._lock:
            assert request_id not in self._unfinished, f"{request_id!r} has not ended"
            if self._start is None:
                self._start = now
            arrival = _Arrival(now, len(prompt_token_ids), hashes, max_tokens, priority)
            self._unfinished[request_id] = arrival

    def finished(self, request_id: str, num_output_tokens: int, now: float) -> None:
        """A request ended at `now` with so many tokens of output, whatever the reason."""
        with self._lock:
            arrival = self._unfinished.pop(request_id)
            assert now >= arrival.time, f"{request_id!r} ended before it came"
            assert num_output_tokens <= arrival.max_tokens, f"{request_id!r} has more than max_tokens"
            if num_output_tokens < 1 or self._file.closed:
                self._num_left_out += 1
                return
            assert self._start is not None
            self._write(json.dumps(_line(arrival, self._start, num_output_tokens, now)) + "\n")

    @property
    def num_left_out(self) -> int:
        """Requests that ended without a token of output, or that came too late for the file."""
        return self._num_left_out

    def close(self) -> None:
        """Complete the file. What ends afterwards is left out."""
        with self._lock:
            self._file.close()

    def _write(self, line: str) -> None:
        """One line; a full disk ends the recording and not the serving."""
        try:
            self._file.write(line)
        except OSError as error:
            self._num_left_out += 1
            logger.error("trace %s: recording ends here (%s)", self._file.name, error.strerror or error)
            with suppress(OSError):
                self._file.close()

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class EngineRecorder:
    """Feeds a TraceRecorder from an engine core: `on_add` is called with its requests, `emit` with its events."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder

    def on_add(self, request: Request) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens]
        max_tokens = request.max_total_tokens - request.num_prompt_tokens
        self._recorder.arrived(request.request_id, prompt, max_tokens, request.arrival_time, request.priority)

    def emit(self, event: Event) -> None:
        if isinstance(event, RequestFinished):
            self._recorder.finished(event.request_id, event.num_output_tokens, event.time)

    def close(self) -> None:
        self._recorder.close()


def _block_hashes(key: bytes, token_ids: Sequence[int]) -> list[str]:
    """A keyed hash for each full block, of its tokens and the hash of the block before."""
    hashes: list[str] = []
    previous = b""
    for end in range(HASH_BLOCK_SIZE, len(token_ids) + 1, HASH_BLOCK_SIZE):
        block = array("q", list(token_ids[end - HASH_BLOCK_SIZE : end])).tobytes()
        previous = hashlib.blake2b(previous + block, digest_size=DIGEST_BYTES, key=key).digest()
        hashes.append(previous.hex())
    return hashes


def _line(arrival: _Arrival, start: float, num_output_tokens: int, now: float) -> dict[str, Any]:
    line: dict[str, Any] = {
        "arrival": round(max(0.0, arrival.time - start), 6),
        "prompt_len": arrival.num_prompt_tokens,
        "output_len": num_output_tokens,
        "max_tokens": arrival.max_tokens,
        "e2e_latency": round(now - arrival.time, 6),
    }
    if arrival.priority:
        line["priority"] = arrival.priority
    if arrival.prompt_hashes:
        line |= {"hash_block_size": HASH_BLOCK_SIZE, "prompt_hashes": arrival.prompt_hashes}
    return line
