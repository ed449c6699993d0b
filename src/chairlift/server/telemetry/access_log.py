"""The access log: one line for each call, with sizes and times."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from chairlift.server.access.call import Call
from chairlift.server.telemetry.engine_observer import ObservedRequest
from chairlift.system.log_format import format_time
from chairlift.system.output_files import reopen, unwritable_file_error

logger = logging.getLogger("chairlift")

PLAIN: Final = "/-._~!$&'()*+,;=:@"
"""Characters that are not escaped in a path, in addition to letters and digits (RFC 3986, section 3.3)."""
BUFFER_BYTES: Final = 1 << 20
"""The size of the buffer of the file. The end of a line that a full disk has cut waits in it: no line is longer."""


class AccessLog:
    """Writes a line for each call to a file, or to standard error without a path; raises ConfigError if the file cannot
    be opened. The format is "text" or "json".

    A full disk does not stop the server. A warning reports that a line could not be written. It and the next ones are
    written later, as far as the buffer of the file has room for them.
    """

    def __init__(self, log_format: str, path: Path | None = None) -> None:
        self._is_json = log_format == "json"
        self._name = "standard error" if path is None else f"access_log={path}"
        self._is_writable = True
        try:
            self._file = sys.__stderr__ if path is None else path.open("a", BUFFER_BYTES, "utf-8", "backslashreplace")
        except OSError as error:
            assert path is not None
            raise unwritable_file_error("access_log", path, error) from None

    def __call__(self, call: Call, sequences: list[ObservedRequest]) -> None:
        fields = _fields(call, sequences)
        self.write(json.dumps(fields, separators=(",", ":")) if self._is_json else _text(fields))

    def write(self, line: str) -> None:
        """Append a line and a newline, unless it is closed. Errors of the file are logged, not raised."""
        if self._file is None or self._file.closed:  # A process may have no standard error.
            return
        try:
            self._file.write(f"{line}\n")
            self._file.flush()
        except OSError as error:
            if self._is_writable:
                logger.warning("%s: cannot be written (%s)", self._name, error.strerror or error)
            self._is_writable = False
        else:
            self._is_writable = True

    def reopen(self) -> str:
        """Reopen the file, unless it is standard error. Returns what `output_files.reopen` does."""
        return "" if self._file is None or self._file is sys.__stderr__ else reopen("access_log", self._file)

    def close(self) -> None:
        if self._file is not None and self._file is not sys.__stderr__:
            with contextlib.suppress(OSError):
                self._file.close()


def _fields(call: Call, sequences: list[ObservedRequest]) -> dict[str, Any]:
    """The fields of a line, without empty ones. Times are in seconds, and numbers of tokens are sums over sequences."""
    fields: dict[str, Any] = {
        "time": format_time(call.time),
        "level": "ERROR" if call.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "INFO",
        "client": call.client,
        "key": call.key.name,
        "method": call.method,
        "path": call.path,
        "status": call.status,
        "reason": call.reason,
        "duration": round(call.seconds, 6),
        "is_disconnected": call.is_disconnected or None,
        "request_id": call.response_id,
        "ignored": ",".join(call.ignored),
        **_sequence_fields(call, sequences),
    }
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _sequence_fields(call: Call, observed: list[ObservedRequest]) -> dict[str, Any]:
    sequences = [each.request for each in observed if not each.is_resent]
    if not sequences:
        return {}
    first = sequences[0]
    first_tokens = [s.time_to_first_token for s in sequences if s.time_to_first_token is not None]
    queue_times = [s.queue_time for s in sequences if s.queue_time is not None]
    leaders = [s for s in sequences if s.arrived.leader_id is None]
    return {
        "prompt_tokens": sum(s.arrived.num_prompt_tokens for s in leaders),
        "cached_tokens": sum(s.num_cached_tokens for s in leaders),
        "output_tokens": sum(s.num_output_tokens for s in sequences),
        "queue_time": round(max(queue_times), 6) if queue_times else None,
        "ttft": round(min(first_tokens), 6) if first_tokens else None,
        "preemptions": sum(s.num_preemptions for s in sequences) or None,
        "finish_reason": call.finish_reason or (None if first.finished is None else first.finished.finish_reason),
        "replica": ",".join(dict.fromkeys(each.observer.replica_id or "" for each in observed)),
    }


def _text(fields: dict[str, Any]) -> str:
    """The first seven values, then the other fields as `key=value`. Values are escaped, so that no request can forge a
    line or a field."""
    fields["path"] = quote(fields.get("path", "-"), safe=PLAIN)
    head = [str(fields.pop(name, "-")) for name in ("time", "level", "client", "key", "method", "path", "status")]
    rest = [f"{name}={json.dumps(value)}" for name, value in fields.items()]
    return " ".join((*head, *rest))
