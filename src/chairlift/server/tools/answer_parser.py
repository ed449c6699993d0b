"""Parsers that split the text of an answer into content, reasoning and tool calls while it is generated."""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeltaToolCall:
    """New text of the tool call at `index`. Only the first delta of a call has its id and name."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(slots=True)
class DeltaMessage:
    """New content, reasoning and tool calls of an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[DeltaToolCall] = field(default_factory=list)


class AnswerParser(ABC):
    """Splits the text of one answer while it arrives. The sum of the deltas does not depend on how the text is cut."""

    @abstractmethod
    def feed(self, text: str) -> DeltaMessage:
        """Return what is certain after this text. Text that may begin a marker is held back."""

    def finish(self) -> DeltaMessage:
        """Return the text that was held back, at the end of the answer."""
        return DeltaMessage()


class PlainTextParser(AnswerParser):
    """Returns all text as content."""

    def feed(self, text: str) -> DeltaMessage:
        return DeltaMessage(content=text)


class NamedToolParser(AnswerParser):
    """Returns all text as the arguments of one call of a known tool."""

    def __init__(self, name: str, id_length: int | None) -> None:
        self._name = name
        self._id_length = id_length
        self._has_started = False

    def feed(self, text: str) -> DeltaMessage:
        if not text:
            return DeltaMessage()
        is_first, self._has_started = not self._has_started, True
        call_id = new_call_id(self._id_length) if is_first else None
        call = DeltaToolCall(0, call_id, self._name if is_first else None, text)
        return DeltaMessage(tool_calls=[call])


def overlap(text: str, markers: tuple[str, ...]) -> int:
    """The length of the longest suffix of a text that is a proper prefix of one of the markers."""
    longest = min(len(text), max(map(len, markers), default=0) - 1)
    return next((n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) and len(m) > n for m in markers)), 0)


def new_call_id(length: int | None = None) -> str:
    """A random id for a tool call.

    Args:
        length: the number of letters and digits (Mistral's chat templates require 9); None for the form of OpenAI.
    """
    if length is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))
