"""Parsers of the tags around the reasoning at the start of an answer, and around the text after it."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.server.tools.answer_parser import AnswerParser, DeltaMessage, MarkerParser
from chairlift.structured_outputs import Reasoning


def without_last_break(reasoning: str) -> str:
    """Reasoning without the line breaks, and the blanks beside them, that templates write before the closing tag."""
    text = reasoning.rstrip()
    return text if "\n" in reasoning[len(text) :] else reasoning


class ReasoningParser(MarkerParser):
    """Returns the reasoning at the start of an answer, and parses the text after it with another parser.

    Args:
        form: the tags, and whether the prompt has opened the reasoning already.
        new_rest: creates the parser of the text after the reasoning.
        openings: texts that begin tool calls. If the reasoning is not closed, a call in it belongs to the answer:
            Qwen3.5 may omit the closing tag before a call. Text from an opening is held back until it is decided.
        new_answer: creates the parser of an answer without reasoning, if it is another one.
    """

    def __init__(
        self,
        form: Reasoning,
        new_rest: Callable[[], AnswerParser],
        openings: tuple[str, ...] = (),
        new_answer: Callable[[], AnswerParser] | None = None,
    ) -> None:
        super().__init__(self._after_opening if form.is_inside else self._before_opening)
        self._form, self._openings = form, openings
        self._rest, self._new_answer = new_rest(), new_answer
        self._undecided: list[str] = []
        self._may_open = form.is_inside
        self._label = form.label

    def finish(self, is_complete: bool = False) -> DeltaMessage:
        held = "".join(self._undecided) + self._take_held()
        if self._undecided and is_complete:
            answer = DeltaMessage.joined([*self._rest.feed_parts(held.lstrip("\n")), self._rest.finish(is_complete)])
            return answer if answer.tool_calls else DeltaMessage(reasoning=without_last_break(held))
        if self._undecided or self._advance in (self._after_opening, self._in_reasoning):
            return DeltaMessage(reasoning=without_last_break(held))
        rest = held.lstrip("\n") if self._advance == self._after_closing else held
        return DeltaMessage.joined([self._rest.feed(rest), self._rest.finish(is_complete)])

    def _before_opening(self) -> bool:
        text = self._held.lstrip()
        if text.startswith(self._form.opening):
            self._held, self._advance = text[len(self._form.opening) :], self._after_opening
            return True
        if not text or self._form.opening.startswith(text):
            return False
        self._rest = self._new_answer() if self._new_answer else self._rest
        self._advance = self._in_answer
        return True

    def _after_opening(self) -> bool:
        """Remove line breaks, a repetition of the opening tag of the prompt, and the label."""
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
        if not self._held or (self._label and self._label.startswith(self._held)):
            return False
        self._advance = self._in_reasoning
        return True

    def _in_reasoning(self) -> bool:
        text, marker = self._take_until((self._form.closing, *self._openings))
        reasoning = text.rstrip() if marker is None else without_last_break(text)
        self._piece.reasoning += reasoning
        if marker is None:  # White space may end in a line break before the closing tag.
            self._held = text[len(reasoning) :] + self._held
            return False
        self._advance = self._after_closing
        if marker != self._form.closing:
            self._undecided, self._advance = [text[len(reasoning) :], marker], self._in_undecided
        return True

    def _in_undecided(self) -> bool:
        """Read text that begins like a call. It is reasoning if the closing tag follows."""
        text, closing = self._take_until((self._form.closing,))
        self._undecided.append(text)
        if closing is None:
            return False
        self._piece.reasoning += without_last_break("".join(self._undecided))
        self._undecided, self._advance = [], self._after_closing
        return True

    def _after_closing(self) -> bool:
        self._held = self._held.lstrip("\n")
        if not self._held:
            return False
        self._advance = self._in_answer
        return True

    def _in_answer(self) -> bool:
        self._piece = DeltaMessage.joined([self._piece, self._rest.feed(self._take_held())])
        return False


class SpecialTagParser(MarkerParser):
    """Removes tags that are special tokens wherever they occur, and parses the other text with another parser."""

    def __init__(self, tags: tuple[str, ...], new_rest: Callable[[], AnswerParser]) -> None:
        super().__init__(self._in_text)
        self._tags, self._rest = tags, new_rest()

    def feed(self, text: str) -> DeltaMessage:
        return self._rest.feed(super().feed(text).content)

    def finish(self, is_complete: bool = False) -> DeltaMessage:
        return DeltaMessage.joined([self._rest.feed(self._take_held()), self._rest.finish(is_complete)])

    def _in_text(self) -> bool:
        text, tag = self._take_until(self._tags)
        self._piece.content += text
        return tag is not None


class AnswerTagParser(MarkerParser):
    """Removes the tags around an answer, and parses its text with another parser.

    The closing tag counts at the end of the answer and before a call. Elsewhere it is text.

    Args:
        tags: the opening and the closing tag.
        new_rest: creates the parser of the text.
        openings: texts that begin tool calls.
        is_inside: the prompt has the opening tag already.
    """

    def __init__(
        self,
        tags: tuple[str, str],
        new_rest: Callable[[], AnswerParser],
        openings: tuple[str, ...] = (),
        is_inside: bool = False,
    ) -> None:
        super().__init__(self._inside if is_inside else self._before_opening)
        self._tags, self._openings = tags, openings
        self._rest = new_rest()
        self._closing = ""  # The closing tag that may be the last, with the line breaks before it.

    def feed(self, text: str) -> DeltaMessage:
        return self._rest.feed(super().feed(text).content)

    def finish(self, is_complete: bool = False) -> DeltaMessage:
        held = self._take_held()
        text = self._closing + held if held.strip() or not self._closing else ""
        return DeltaMessage.joined([*self._rest.feed_parts(text), self._rest.finish(is_complete)])

    def _before_opening(self) -> bool:
        text = self._held.lstrip()
        if text.startswith(self._tags[0]):
            self._held, self._advance = text[len(self._tags[0]) :], self._after_opening
            return True
        if text and not self._tags[0].startswith(text):
            self._advance = self._outside
        return self._advance == self._outside

    def _after_opening(self) -> bool:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._advance = self._inside
        return bool(self._held)

    def _inside(self) -> bool:
        text, closing = self._take_until(self._tags[1:])
        shown = text.rstrip("\n")
        self._piece.content += shown
        if closing is None:
            self._held = text[len(shown) :] + self._held
            return False
        self._closing, self._advance = text[len(shown) :] + closing, self._after_closing
        return True

    def _after_closing(self) -> bool:
        text = self._held.lstrip()
        if not text or any(opening.startswith(text) and opening != text for opening in self._openings):
            return False
        if not text.startswith(self._openings):
            self._piece.content += self._closing
        self._closing, self._advance = "", self._inside
        return True

    def _outside(self) -> bool:
        self._piece.content += self._take_held()
        return False
