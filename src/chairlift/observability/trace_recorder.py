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
from pathlib import Path
from typing import Any, Final

from chairlift.events import Event, RequestFinished
from chairlift.request import Request
from chairlift.system.output_files import reopen, unwritable_file_error

logger = logging.getLogger("chairlift")

DIGEST_BYTES: Final = 8
HASH_BLOCK_SIZE: Final = 16
"""Number of prompt tokens for each hash."""


class TraceRecorder:
    """Writes each finished request of an engine core as a JSON line in Chairlift's trace format. The core calls
    `on_add` with its requests and `emit` with its events, possibly on different threads.

    Texts, tokens, names and request ids are not written. Prompts with a common prefix, and with the same adapter and
    salt, have equal hashes of their blocks of 16 tokens, and requests of a tenant an equal hash of it. Each hash of a
    block includes the previous one, and all a random key that is not written, so hashes of one file can be compared
    with each other, but not with guesses.
    Times count from the first request.

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
        self._unfinished: dict[str, dict[str, Any]] = {}
        self._start: float | None = None

    def on_add(self, request: Request) -> None:
        """Record the arrival of a request; no unfinished request may have the same id."""
        root = f"{request.lora_id}\0{request.cache_salt or ''}".encode()
        hashes = _block_hashes(self._key, root, request.token_ids[: request.num_prompt_tokens])
        line: dict[str, Any] = {
            "arrival": 0.0,
            "prompt_len": request.num_prompt_tokens,
            "output_len": 0,
            "max_tokens": request.max_total_tokens - request.num_prompt_tokens,
            "e2e_latency": 0.0,
        }
        slo, tenant = request.sampling_params.slo, request.tenant.encode()
        hashed = tenant and hashlib.blake2b(tenant, digest_size=DIGEST_BYTES, key=self._key).hexdigest()
        known = {"priority": request.priority, "tenant": hashed, "slo": slo and slo.to_mapping()}
        line |= {name: value for name, value in known.items() if value}
        if not request.sampling_params.is_streamed:
            line["is_streamed"] = False
        if hashes:
            line |= {"hash_block_size": HASH_BLOCK_SIZE, "prompt_hashes": hashes}
        with self._lock:
            assert request.request_id not in self._unfinished, f"{request.request_id!r} is unfinished"
            if self._start is None:
                self._start = request.arrival_time
            line["arrival"] = round(max(0.0, request.arrival_time - self._start), 6)
            self._unfinished[request.request_id] = line

    def emit(self, event: Event) -> None:
        """Write the line of a request that ended with an output token."""
        if not isinstance(event, RequestFinished):
            return
        with self._lock:
            line = self._unfinished.pop(event.request_id)
            assert event.time >= event.arrival_time, f"{event.request_id!r} ended before it arrived"
            assert event.num_output_tokens <= line["max_tokens"], f"{event.request_id!r} has more than max_tokens"
            if event.num_output_tokens and not self._file.closed:
                line["output_len"] = event.num_output_tokens
                line["e2e_latency"] = round(event.time - event.arrival_time, 6)
                self._write(json.dumps(line) + "\n")

    def reopen(self) -> None:
        """Continue in the file that has the path now, unless the recording has ended. An error is logged."""
        reopen("record_trace", self._file)

    def close(self) -> None:
        """Close the file. Requests that end later are not recorded."""
        with self._lock:
            self._file.close()

    def _write(self, line: str) -> None:
        """Write one line. An error, such as a full disk, ends the recording."""
        try:
            self._file.write(line)
        except OSError as error:
            logger.error("trace %s: cannot be written (%s); recording ends", self._file.name, error.strerror or error)
            with suppress(OSError):
                self._file.close()


def _block_hashes(key: bytes, root: bytes, token_ids: Sequence[int]) -> list[str]:
    """A keyed hash for each full block, of its tokens and the previous hash; `root` is in place of the first one."""
    hashes: list[str] = []
    previous = root
    for end in range(HASH_BLOCK_SIZE, len(token_ids) + 1, HASH_BLOCK_SIZE):
        block = array("q", list(token_ids[end - HASH_BLOCK_SIZE : end])).tobytes()
        previous = hashlib.blake2b(previous + block, digest_size=DIGEST_BYTES, key=key).digest()
        hashes.append(previous.hex())
    return hashes
