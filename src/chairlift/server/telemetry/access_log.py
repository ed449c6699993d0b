"""The access log: one line for each call, with sizes and times."""

from __future__ import annotations

import contextlib
import json
import sys
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

from chairlift.server.access.call import Call
from chairlift.server.telemetry.engine_observer import ObservedRequest
from chairlift.system.log_format import format_time

PLAIN: Final = "/-._~!$&'()*+,;=:@"
"""Characters that are not escaped in a path, in addition to letters and digits (RFC 3986, section 3.3)."""


class AccessLog:
    """Writes a line for each call to standard error, in the format "text" or "json"."""

    def __init__(self, log_format: str) -> None:
        self._is_json = log_format == "json"
        self._file = sys.__stderr__  # Ray Serve replaces sys.stderr. A process may have no standard error.

    def __call__(self, call: Call, sequences: list[ObservedRequest]) -> None:
        fields = _fields(call, sequences)
        self.write(json.dumps(fields, separators=(",", ":")) if self._is_json else _text(fields))

    def write(self, line: str) -> None:
        """Write a line and a newline. An error such as a full disk does not stop the server."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.write(f"{line}\n")
                self._file.flush()


def _fields(call: Call, sequences: list[ObservedRequest]) -> dict[str, Any]:
    """The fields of a line, without empty ones. `time` is the start of a call. Durations are in seconds, and numbers of
    tokens are sums over sequences."""
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
        "end": format_time(call.time + call.seconds),
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
