"""Parts what a model thinks from what it says: `--reasoning-parser`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from chairlift.errors import ConfigError
from chairlift.server.tools.answer_parser import AnswerParser, DeltaMessage, overlap
from chairlift.structured_outputs import Reasoning


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Attributes:
    opening, closing: what stands around the reasoning.
    is_implied: answers begin with it, whether or not they say so.
    """

    opening: str
    closing: str
    is_implied: bool = False


REASONING_FORMATS: Final[dict[str, ReasoningFormat]] = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", is_implied=True),
}


def reasoning_format(name: str, chat_template: str | None) -> ReasoningFormat | None:
    """The format of that name; `auto` goes by whether the model's chat template writes tags, `none` is none.

    Raises:
        ConfigError: there is none of that name.
    """
    if name == "none":
        return None
    if name == "auto":
        return REASONING_FORMATS["qwen3"] if "</think>" in (chat_template or "") else None
    if name not in REASONING_FORMATS:
        raise ConfigError(f"reasoning_parser={name!r}: there are auto, none, {', '.join(REASONING_FORMATS)}")
    return REASONING_FORMATS[name]


class _ReasoningState(enum.Enum):
    START = enum.auto()
    REASONING = enum.auto()
    BREAK = enum.auto()
    ANSWER = enum.auto()


class ReasoningParser:
    """Reasoning first, then whatever the parser of the rest makes of the rest.

    Args:
        form: how this answer may think.
        rest: reads what is left.
    """

    def __init__(self, form: Reasoning, rest: AnswerParser) -> None:
        self._form = form
        self._rest = rest
        self._state = _ReasoningState.REASONING if form.is_inside else _ReasoningState.START
        self._is_first = True
        self._may_open = self._state is _ReasoningState.REASONING
        self._held = ""

    def feed(self, text: str) -> DeltaMessage:
        """What is certain after this text."""
        if self._state is _ReasoningState.ANSWER:
            return self._rest.feed(text)
        self._held += text
        if self._state is _ReasoningState.START:
            self._look_for_opening()
        reasoning = self._reasoning() if self._state is _ReasoningState.REASONING else ""
        if self._state is _ReasoningState.BREAK and (answer := self._held.lstrip("\n")):
            self._held, self._state = answer, _ReasoningState.ANSWER
        piece = DeltaMessage()
        if self._state is _ReasoningState.ANSWER:
            answer, self._held = self._held, ""
            piece = self._rest.feed(answer)
        piece.reasoning += reasoning
        return piece

    def finish(self) -> DeltaMessage:
        """What was held back: no more text will come."""
        held, self._held = self._held, ""
        if self._state is _ReasoningState.REASONING:
            return DeltaMessage(reasoning=held)
        piece = self._rest.feed("" if self._state is _ReasoningState.BREAK else held)
        last = self._rest.finish()
        return DeltaMessage(piece.content + last.content, "", [*piece.calls, *last.calls])

    def _look_for_opening(self) -> None:
        text = self._held.lstrip()
        if text.startswith(self._form.opening):
            self._held, self._state = text[len(self._form.opening) :], _ReasoningState.REASONING
        elif text and not self._form.opening.startswith(text):
            self._state = _ReasoningState.ANSWER

    def _reasoning(self) -> str:
        if self._is_first and not self._begin():
            return ""
        at = self._held.find(self._form.closing)
        if at >= 0:
            reasoning, self._held = self._held[:at].rstrip("\n"), self._held[at + len(self._form.closing) :]
            self._state = _ReasoningState.BREAK
            return reasoning
        shown = self._held[: len(self._held) - overlap(self._held, (self._form.closing,))].rstrip("\n")
        self._held = self._held[len(shown) :]
        self._is_first = self._is_first and not shown
        return shown

    def _begin(self) -> bool:
        """Leave out new lines, and the opening if a prompt that has it is repeated; False: more text is needed."""
        self._held = self._held.lstrip("\n")
        if self._may_open and self._held.startswith(self._form.opening):
            self._held = self._held[len(self._form.opening) :].lstrip("\n")
        elif self._may_open and self._form.opening.startswith(self._held):
            return False
        self._may_open = False
        return bool(self._held)
