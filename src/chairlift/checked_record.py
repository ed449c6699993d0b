"""Records whose constructor checks the fields, and that are not checked again when they are decoded from a message."""

from __future__ import annotations

from functools import wraps
from typing import Any, Protocol, TypeVar

from chairlift.errors import RequestError
from chairlift.options import unknown_option


class CheckedRecord(Protocol):
    def check(self) -> None:
        """Check the fields; raises RequestError."""


Record = TypeVar("Record", bound=CheckedRecord)


def check_when_constructed(record: type[Record]) -> type[Record]:
    """Let the constructor of a dataclass call `check`, and raise RequestError with advice for unknown fields.

    msgspec decodes a record without its constructor. A message between two processes has records that one of them has
    checked, and a check takes longer than the rest of the message.
    """
    make, known = record.__init__, list(record.__annotations__)

    @wraps(make)
    def init(self: Record, *values: Any, **given: Any) -> None:
        if (name := next((name for name in given if name not in known), None)) is not None:
            raise RequestError(unknown_option(name, known), name)
        make(self, *values, **given)
        self.check()

    record.__init__ = init  # type: ignore[assignment]
    return record
