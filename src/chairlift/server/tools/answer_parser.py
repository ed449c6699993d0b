"""Parsers that split the text of an answer into content, reasoning and tool calls while it is generated."""

from __future__ import annotations

import contextlib
import json
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from chairlift.grammar.answer_start import overlap
from chairlift.outputs import CompletionOutput
from chairlift.request import FinishReason
from chairlift.server.tools.literal_scanners import completion

CHARACTERS_PER_FEED: Final = 1024


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

    @classmethod
    def joined(cls, pieces: Sequence[DeltaMessage]) -> DeltaMessage:
        """The sum of pieces, with one delta for each call."""
        calls: dict[int, list[DeltaToolCall]] = {}
        for call in (call for piece in pieces for call in piece.tool_calls):
            calls.setdefault(call.index, []).append(call)
        return cls(
            "".join(piece.content for piece in pieces),
            "".join(piece.reasoning for piece in pieces),
            [replace(parts[0], arguments="".join(part.arguments for part in parts)) for parts in calls.values()],
        )


class AnswerParser(ABC):
    """Splits the text of one answer while it arrives. The sum of the deltas does not depend on how the text is cut.

    Attributes:
        num_held_tokens: the tokens after the last output, whose text the next one may parse again.
    """

    num_held_tokens = 0

    def read(self, answer: CompletionOutput) -> list[DeltaMessage]:
        """Parse new output of the answer, and end it with the output."""
        pieces = self.feed_parts(answer.text)
        if answer.finish_reason is not None:
            pieces.append(self.finish(answer.finish_reason == FinishReason.STOP))
        is_held = all(piece == DeltaMessage() for piece in pieces)
        self.num_held_tokens = self.num_held_tokens + len(answer.token_ids) if is_held else 0
        return pieces

    def feed_parts(self, text: str) -> list[DeltaMessage]:
        """Parse a long text in parts, because a parser may scan the text that it holds repeatedly."""
        starts = range(0, max(1, len(text)), CHARACTERS_PER_FEED)
        return [self.feed(text[start : start + CHARACTERS_PER_FEED]) for start in starts]

    @abstractmethod
    def feed(self, text: str) -> DeltaMessage:
        """Return what is certain after this text. Text that may begin a marker is held back."""

    def finish(self, is_complete: bool = False) -> DeltaMessage:
        """Return the text that was held back, at the end of the answer. If the model has ended it (`is_complete`),
        arguments of a call that break off are completed."""
        return DeltaMessage()


class PlainTextParser(AnswerParser):
    """Returns all text as content."""

    def feed(self, text: str) -> DeltaMessage:
        return DeltaMessage(content=text)


class MarkerParser(AnswerParser):
    """The base of parsers of text with markers, which have a state for each kind of text.

    Args:
        state: the first state: a method that processes one element of the held text, and returns False if it needs more
            text. A state sets `_advance` to the next one.
        max_calls: the maximum number of calls that are returned; later ones are dropped.
        id_length: the number of letters and digits of call ids (Mistral's chat templates require 9); None for the form
            of OpenAI.
    """

    def __init__(
        self,
        state: Callable[[], bool],
        names: frozenset[str] = frozenset(),
        max_calls: int | None = None,
        id_length: int | None = None,
    ) -> None:
        self._advance = state
        self._names, self._max_calls, self._id_length = names, max_calls, id_length
        self._num_calls = 0
        self._written: list[str] = []
        self._held = ""
        self._piece = DeltaMessage()

    def feed(self, text: str) -> DeltaMessage:
        self._held += text
        while self._advance():
            pass
        return self._take_piece()

    def _take_piece(self) -> DeltaMessage:
        piece, self._piece = self._piece, DeltaMessage()
        return piece

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held

    def _take_until(self, markers: tuple[str, ...]) -> tuple[str, str | None]:
        """Remove the text before the first marker from the held text, and the marker too, and return both.

        Without a marker return None, and leave the end of the text that may begin one. Of markers at the same place the
        longest counts.
        """
        found = min(((at, -len(m), m) for m in markers if (at := self._held.find(m)) >= 0), default=None)
        if found is None:
            end, marker = len(self._held) - overlap(self._held, markers), None
            text, self._held = self._held[:end], self._held[end:]
        else:
            at, _, marker = found
            text, self._held = self._held[:at], self._held[at + len(marker) :]
        return text, marker

    def _begin_call(self, name: str, arguments: str = "", call_id: str | None = None) -> None:
        self._num_calls += 1
        self._written = [arguments] if arguments else []
        random_id = f"call_{secrets.token_hex(12)}"
        if self._id_length is not None:
            characters = string.ascii_letters + string.digits
            random_id = "".join(secrets.choice(characters) for _ in range(self._id_length))
        self._add_call_delta(call_id or random_id, name, arguments)

    def _add_arguments(self, text: str) -> None:
        if text:
            self._written.append(text)
            self._add_call_delta(None, None, text)

    def _has_whole_arguments(self) -> bool:
        """Whether the arguments of the last call are JSON."""
        with contextlib.suppress(ValueError, RecursionError):
            json.loads("".join(self._written))
            return True
        return False

    def _complete_arguments(self) -> None:
        """Complete the arguments of the last call if they break off."""
        if self._num_calls:
            self._add_arguments(completion("".join(self._written)))

    def _add_call_delta(self, call_id: str | None, name: str | None, arguments: str) -> None:
        if self._max_calls is None or self._num_calls <= self._max_calls:
            self._piece.tool_calls.append(DeltaToolCall(self._num_calls - 1, call_id, name, arguments))


class NamedToolParser(MarkerParser):
    """Returns all text as the arguments of one call of a known tool."""

    def __init__(self, name: str, id_length: int | None) -> None:
        super().__init__(self._in_call, id_length=id_length)
        self._name = name

    def finish(self, is_complete: bool = False) -> DeltaMessage:
        if is_complete:
            self._complete_arguments()
        return self._take_piece()

    def _in_call(self) -> bool:
        text = self._take_held()
        if text and not self._num_calls:
            self._begin_call(self._name, text)
        else:
            self._add_arguments(text)
        return False
