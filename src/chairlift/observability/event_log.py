"""The event log: the JSON of events, and the file that `event_log` names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import msgspec

from chairlift.events import Event
from chairlift.system.output_files import reopen, unwritable_file_error

logger = logging.getLogger("chairlift")

_encode: Final = msgspec.json.Encoder().encode


def encode_event(event: Event) -> bytes:
    """The JSON of an event, which is its line in a log without the newline. `chairlift.events.from_json` reads it."""
    return b'{"type":"%b",%b' % (event.type.encode(), _encode(event)[1:])


class EventFile:
    """An event sink that writes JSON lines to a file.

    If an event cannot be written, it and later ones are dropped until the file is reopened, `error` is set, and the
    engine continues. Events after the end of the log are dropped too.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.error: Exception | None = None
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise unwritable_file_error("event_log", path, error) from None

    def emit(self, event: Event) -> None:
        if self.error is None and not self._file.closed:
            try:
                self._file.write(encode_event(event) + b"\n")
                self._file.flush()
            except (OSError, UnicodeEncodeError) as error:
                self._record_error(error)

    def reopen(self) -> None:
        """Continue in the file that has the path now. An error is logged."""
        if reopen("event_log", self._file):
            self.error = None

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            self._record_error(error)

    def _record_error(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            logger.warning("event log %s: cannot be written, later events are dropped: %s", self._file.name, error)
