"""What an answer consists of: content, reasoning and tool calls, as far as they are known."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What is new of the tool call at `index`. The first one has its id and name."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(slots=True)
class AnswerDelta:
    """What is new of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class AnswerParser(Protocol):
    """Splits the text of one answer as it comes. However it is cut into parts, the pieces add up to the same."""

    def feed(self, text: str) -> AnswerDelta:
        """What is certain after this text."""
        ...

    def finish(self) -> AnswerDelta:
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
