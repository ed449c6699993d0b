"""Records served requests as a workload that can be replayed: lengths, times and keyed hashes of prompt blocks."""

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

from chairlift.events import Event, RequestFinished
from chairlift.request import Request
from chairlift.system.output_files import unwritable_file_error

logger = logging.getLogger("chairlift")

DIGEST_BYTES: Final = 8
HASH_BLOCK_SIZE: Final = 16
"""Number of prompt tokens for each hash."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    """An unfinished request."""

    time: float
    num_prompt_tokens: int
    prompt_hashes: list[str]
    max_tokens: int
    priority: int


class TraceRecorder:
    """Writes each finished request as a JSON line in Chairlift's trace format. Its methods can be called by any thread.

    Texts, tokens and request ids are not written. Prompts with a common prefix have equal hashes of their blocks of 16
    tokens. Each hash includes the previous one and a random key that is not written, so hashes of one file can be
    compared with each other, but not with hashes of guessed prompts. Times count from the first request.

    A replay generates other outputs, so prefix-cache hits on earlier outputs of a conversation are not reproduced.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | str) -> None:
        try:
            self._file = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115
        except OSError as error:
            raise unwritable_file_error("record_trace", Path(path), error) from None
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._unfinished: dict[str, _Arrival] = {}
        self._start: float | None = None
        self._num_left_out = 0

    def arrived(
        self, request_id: str, prompt_token_ids: Sequence[int], max_tokens: int, now: float, priority: int = 0
    ) -> None:
        """Record the arrival of a request at `now`, in seconds; no unfinished request may have the same id."""
        hashes = _block_hashes(self._key, prompt_token_ids)
        with self._lock:
            assert request_id not in self._unfinished, f"{request_id!r} is unfinished"
            if self._start is None:
                self._start = now
            arrival = _Arrival(now, len(prompt_token_ids), hashes, max_tokens, priority)
            self._unfinished[request_id] = arrival

    def finished(self, request_id: str, num_output_tokens: int, now: float) -> None:
        """Record the end of a request at `now`, for any reason."""
        with self._lock:
            arrival = self._unfinished.pop(request_id)
            assert now >= arrival.time, f"{request_id!r} ended before it arrived"
            assert num_output_tokens <= arrival.max_tokens, f"{request_id!r} has more than max_tokens"
            if num_output_tokens < 1 or self._file.closed:
                self._num_left_out += 1
                return
            assert self._start is not None
            self._write(json.dumps(_line(arrival, self._start, num_output_tokens, now)) + "\n")

    @property
    def num_left_out(self) -> int:
        """The number of requests that ended without an output token or could not be written."""
        return self._num_left_out

    def close(self) -> None:
        """Close the file. Requests that end later are not recorded."""
        with self._lock:
            self._file.close()

    def _write(self, line: str) -> None:
        """Write one line. An error, such as a full disk, ends the recording."""
        try:
            self._file.write(line)
        except OSError as error:
            self._num_left_out += 1
            logger.error("trace %s: cannot be written (%s); recording ends", self._file.name, error.strerror or error)
            with suppress(OSError):
                self._file.close()

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class EngineRecorder:
    """Connects a TraceRecorder to an engine core, which calls `on_add` with requests and `emit` with events."""

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
    """A keyed hash for each full block, of its tokens and the previous hash."""
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
