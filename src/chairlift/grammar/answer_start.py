"""AnswerStart: finds the end of the reasoning in the text of an answer while it is generated."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.structured_outputs import Reasoning


class AnswerStart:
    """Divides a stream of text into what precedes the answer and the answer.

        white space  opening  reasoning  closing  line breaks  tag  line breaks | answer

    Without the opening the answer begins after the white space and the tag. Adding text takes time linear in that text.

    Args:
        form: the strings around the reasoning; None if the answer begins at once.

    Attributes:
        is_found: whether the answer has begun.
    """

    def __init__(self, form: Reasoning | None) -> None:
        self.is_found = form is None
        self._form = form or Reasoning("", "")
        self._closings = (self._form.closing, *self._form.ends)
        self._tag = self._form.answer
        self._held = ""
        self._advance: Callable[[], int] = self._in_reasoning if self._form.is_inside else self._before_opening
        self._is_waiting = False

    def add(self, text: str) -> tuple[str, str]:
        """Add text; returns what precedes the answer, and what is in it. Text that may begin a marker is held back."""
        if self.is_found:
            return "", text
        self._held += text
        end, self._is_waiting = 0, False
        text = self._held
        while not (self.is_found or self._is_waiting):
            end += self._advance()
            self._held = text[end:]
        return text[:end], self.flush() if self.is_found else ""

    def flush(self) -> str:
        """End the text; returns the part that was held back."""
        text, self._held = self._held, ""
        return text

    def _before_opening(self) -> int:
        text = self._held.lstrip()
        if text.startswith(self._form.opening):
            self._advance = self._in_reasoning
        elif self._form.opening.startswith(text):
            self._is_waiting = True
        else:
            self._advance = self._before_answer
        return len(self._held) - len(text)

    def _in_reasoning(self) -> int:
        if ends := [at + len(closing) for closing in self._closings if (at := self._held.find(closing)) >= 0]:
            self._advance = self._before_answer
            return min(ends)
        self._is_waiting = True
        return len(self._held) - overlap(self._held, self._closings)

    def _before_answer(self) -> int:
        """Read line breaks and the tag of the answer."""
        text = self._held.lstrip("\n")
        num_breaks = len(self._held) - len(text)
        if self._tag and text.startswith(self._tag):
            num_breaks, self._tag = num_breaks + len(self._tag), ""
        elif not text or (self._tag and self._tag.startswith(text)):
            self._is_waiting = True
        else:
            self.is_found = True
        return num_breaks


def overlap(text: str, markers: tuple[str, ...]) -> int:
    """The length of the longest suffix of a text that is a proper prefix of one of the markers."""
    longest = min(len(text), max(map(len, markers), default=0) - 1)
    return next((n for n in range(longest, 0, -1) if any(m.startswith(text[-n:]) and len(m) > n for m in markers)), 0)
