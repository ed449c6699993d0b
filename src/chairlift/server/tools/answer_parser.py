"""What an answer consists of: content, reasoning and tool calls, as far as they are known."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DeltaToolCall:
    """What is new of the tool call at `index`. The first one has its id and name."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(slots=True)
class DeltaMessage:
    """What is new of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[DeltaToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class AnswerParser(Protocol):
    """Splits the text of one answer as it comes. However it is cut into parts, the pieces add up to the same."""

    def feed(self, text: str) -> DeltaMessage:
        """What is certain after this text."""
        ...

    def finish(self) -> DeltaMessage:
        """What was held back: no more text will come."""
        ...


def overlap(text: str, markers: tuple[str, ...]) -> int:
    """The length of the longest end of `text` that begins one of the markers, but is not all of it."""
    longest = min(len(text), max(map(len, markers), default=0) - 1)
    return next((n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) and len(m) > n for m in markers)), 0)


def new_call_id(length: int | None = None) -> str:
    """An id for a tool call: OpenAI's form, or so many letters and digits (Mistral's templates demand 9)."""
    if length is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


class PlainTextParser:
    """The parser of answers that are content alone."""

    def feed(self, text: str) -> DeltaMessage:
        """All of it."""
        return DeltaMessage(content=text)

    def finish(self) -> DeltaMessage:
        """Nothing is held back."""
        return DeltaMessage()


class NamedToolParser:
    """Reads an answer that is the arguments of one known tool."""

    def __init__(self, name: str, id_length: int | None) -> None:
        self._name = name
        self._id_length = id_length
        self._is_told = False

    def feed(self, text: str) -> DeltaMessage:
        """All of it is arguments."""
        if not text:
            return DeltaMessage()
        call_id = None if self._is_told else new_call_id(self._id_length)
        name = None if self._is_told else self._name
        self._is_told = True
        return DeltaMessage(calls=[DeltaToolCall(0, call_id, name, text)])

    def finish(self) -> DeltaMessage:
        """Nothing is held back."""
        return DeltaMessage()
