"""Separates the reasoning of an answer from its content, in the format that `--reasoning-parser` selects."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from chairlift.errors import ConfigError
from chairlift.server.tools.answer_parser import AnswerParser, DeltaMessage, overlap
from chairlift.structured_outputs import Reasoning


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its reasoning.

    Attributes:
        opening, closing: the tags around the reasoning.
        is_implied: answers begin with reasoning even without the opening tag.
        label: the text after the opening tag that is not part of the reasoning.
    """

    opening: str
    closing: str
    is_implied: bool = False
    label: str = ""


REASONING_FORMATS: Final[dict[str, ReasoningFormat]] = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", is_implied=True),
    "olmo3": ReasoningFormat("<think>", "</think>", is_implied=True),
    "gemma4": ReasoningFormat("<|channel>", "<channel|>", label="thought"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
"""Parsers of vLLM. qwen3: Qwen 3, SmolLM3 and others that write both tags, or whose prompt ends with the opening.
deepseek_r1, olmo3: models that write only the closing tag. gemma4: Gemma 4. granite: Granite 3.2. mistral:
Magistral."""

TEMPLATE_MARKS: Final = (
    (("</think>", "<\N{FULLWIDTH VERTICAL LINE}Assistant\N{FULLWIDTH VERTICAL LINE}>"), "deepseek_r1"),
    (("</think>",), "qwen3"),
    (("<|channel>", "<channel|>"), "gemma4"),
    (("[/THINK]",), "mistral"),
    (("Here is my thought process:",), "granite"),
)
"""Texts that all occur in a chat template, and the parser that they select. The first entry that applies counts."""


def reasoning_format(name: str, chat_template: str | None) -> ReasoningFormat | None:
    """The format of this name; `auto` derives it from the tags in the chat template of the model, `none` is None.

    Raises:
        ConfigError: the name is unknown.
    """
    if name == "none":
        return None
    if name == "auto":
        template = chat_template or ""
        found = (parser for marks, parser in TEMPLATE_MARKS if all(mark in template for mark in marks))
        return REASONING_FORMATS.get(next(found, ""))
    if name not in REASONING_FORMATS:
        raise ConfigError(f"reasoning_parser must be one of auto, none, {', '.join(REASONING_FORMATS)}; got {name!r}")
    return REASONING_FORMATS[name]


class _ReasoningState(enum.Enum):
    START = enum.auto()
    REASONING = enum.auto()
    BREAK = enum.auto()
    ANSWER = enum.auto()


class ReasoningParser(AnswerParser):
    """Returns the reasoning at the start of an answer, and parses the text after it with another parser.

    Args:
        form: the tags, and whether the prompt has opened the reasoning already.
        new_rest: creates the parser of the text after the reasoning.
    """

    def __init__(self, form: Reasoning, new_rest: Callable[[], AnswerParser]) -> None:
        self._form = form
        self._rest = new_rest()
        self._state = _ReasoningState.REASONING if form.is_inside else _ReasoningState.START
        self._is_first = True
        self._may_open = self._state is _ReasoningState.REASONING
        self._label = form.label
        self._held = ""

    def feed(self, text: str) -> DeltaMessage:
        if self._state is _ReasoningState.ANSWER:
            return self._rest.feed(text)
        self._held += text
        if self._state is _ReasoningState.START:
            self._look_for_opening()
        reasoning = self._take_reasoning() if self._state is _ReasoningState.REASONING else ""
        if self._state is _ReasoningState.BREAK and (answer := self._held.lstrip("\n")):
            self._held, self._state = answer, _ReasoningState.ANSWER
        piece = DeltaMessage()
        if self._state is _ReasoningState.ANSWER:
            answer, self._held = self._held, ""
            piece = self._rest.feed(answer)
        piece.reasoning += reasoning
        return piece

    def finish(self) -> DeltaMessage:
        held, self._held = self._held, ""
        if self._state is _ReasoningState.REASONING:
            return DeltaMessage(reasoning=held)
        piece = self._rest.feed("" if self._state is _ReasoningState.BREAK else held)
        last = self._rest.finish()
        return DeltaMessage(piece.content + last.content, "", [*piece.tool_calls, *last.tool_calls])

    def _look_for_opening(self) -> None:
        text = self._held.lstrip()
        if text.startswith(self._form.opening):
            self._held, self._state = text[len(self._form.opening) :], _ReasoningState.REASONING
        elif text and not self._form.opening.startswith(text):
            self._state = _ReasoningState.ANSWER

    def _take_reasoning(self) -> str:
        if self._is_first and not self._skip_opening():
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

    def _skip_opening(self) -> bool:
        """Remove line breaks, a repetition of the opening tag of the prompt and the label; return False if more text is
        needed."""
        self._held = self._held.lstrip("\n")
        if self._may_open and self._held.startswith(self._form.opening):
            self._held = self._held[len(self._form.opening) :].lstrip("\n")
        elif self._may_open and self._form.opening.startswith(self._held):
            return False
        self._may_open = False
        if self._label and self._held.startswith(self._label):
            rest = self._held[len(self._label) :]
            if self._form.closing.startswith(rest):
                return False  # The text may go on with a line break, the closing tag or other text.
            if rest.startswith(("\n", self._form.closing)):
                self._held = rest.lstrip("\n")
            self._label = ""
        return bool(self._held) and not (self._label and self._label.startswith(self._held))
