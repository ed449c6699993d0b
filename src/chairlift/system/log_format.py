"""The form of log lines: time, level and message, as text or as JSON."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime


def format_time(seconds: float) -> str:
    """A time since the epoch in UTC, as in 2026-01-31T12:00:00.000+00:00."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


class LogFormatter(logging.Formatter):
    """Formats a record as `time level message`, or as a JSON object with these keys.

    Args:
        as_json: JSON instead of text.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)  # with the traceback, if there is one
        if self._as_json:
            return json.dumps({"time": format_time(record.created), "level": record.levelname, "message": message})
        return f"{format_time(record.created)} {record.levelname} {message}"
