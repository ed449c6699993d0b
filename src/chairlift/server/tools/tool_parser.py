"""Finds the tool calls in the text of an answer, while it is being written."""

from __future__ import annotations

import enum
import re

from chairlift.server.tools.answer_parser import DeltaMessage, DeltaToolCall, new_call_id, overlap
from chairlift.server.tools.call_formats import CallFormat
from chairlift.server.tools.call_scanner import CallScanner

SEPARATORS = " \t\r\n,;[]"
NAMED_CALL = re.compile(r"([A-Za-z0-9_.:-]{1,128})(?:\[CALL_ID\]\w{1,32})?(?:\[ARGS\])?\s*(?={)")
MAX_NAMED_CALL_CHARACTERS = 200  # characters; what goes on without a brace is no call
MAX_UNNAMED_CHARACTERS = (
    512  # characters of an object; what has no name by then is no call, and is not read twice for long
)


class _ParserState(enum.Enum):
    """content -> calls (between two of them) -> call -> calls ... -> content"""

    START = enum.auto()
    CONTENT = enum.auto()
    CALLS = enum.auto()
    CALL = enum.auto()


class ToolParser:
    """Content and calls out of one answer.

    What turns out to be no call is content, as it was written. White space around calls belongs to nobody.

    Args:
        names: of the tools that there are; a call of another one is none.
        max_calls: calls beyond are left out.
    """

    def __init__(self, form: CallFormat, names: frozenset[str], max_calls: int | None = None) -> None:
        self._form = form
        self._names = names
        self._max_calls = max_calls
        self._state = _ParserState.START
        self._held = ""
        self._raw = ""  # since the opening, or since the last call ended: content, if no call follows
        self._space = ""
        self._scanner = CallScanner()
        self._scanned_from = ""
        self._is_told = False
        self._num_calls = 0
        self._piece = DeltaMessage()

    def feed(self, text: str) -> DeltaMessage:
        """What is certain after this text."""
        self._held += text
        while self._advance():
            pass
        return self._take()

    def finish(self) -> DeltaMessage:
        """What was held back: no more text will come."""
        if self._state is _ParserState.CALL and self._scanner.name is None:
            self._raw += self._scanned_from
        if self._state is not _ParserState.CALL or self._scanner.name is None:
            is_between = self._state is _ParserState.CALLS and not (self._raw + self._held).strip(SEPARATORS)
            if not (is_between and self._num_calls):
                self._say(self._raw + self._held)
        if not self._num_calls:
            self._piece.content += self._space
        self._held = self._raw = self._space = ""
        return self._take()

    def _take(self) -> DeltaMessage:
        piece, self._piece = self._piece, DeltaMessage()
        return piece

    def _say(self, text: str) -> None:
        """Content, but for white space at its end: a call may follow."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._piece.content += shown

    def _advance(self) -> bool:
        """Go one step on in what is held; False: more text is needed."""
        match self._state:
            case _ParserState.START:
                return self._start()
            case _ParserState.CONTENT:
                return self._look_for_opening()
            case _ParserState.CALLS:
                return self._between_calls()
            case _ParserState.CALL:
                return self._in_call()

    def _start(self) -> bool:
        text = self._held.lstrip()
        if not text:
            return False
        self._state = _ParserState.CONTENT
        is_opening = any(m.startswith(text) or text.startswith(m) for m in self._form.openings)
        if self._form.is_bare and text[0] in "{[" and not is_opening:
            self._raw, self._held = self._held[: -len(text)], text
            self._state = _ParserState.CALLS
        return True

    def _look_for_opening(self) -> bool:
        found = min(
            ((at, -len(m), m) for m in self._form.openings if (at := self._held.find(m)) >= 0),
            default=None,
        )
        if found is None:
            keep = overlap(self._held, self._form.openings)
            self._say(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return False
        at, _, opening = found
        self._say(self._held[:at])
        self._raw, self._held = opening, self._held[at + len(opening) :]
        self._state = _ParserState.CALLS
        return True

    def _between_calls(self) -> bool:
        if not self._held:
            return False
        for marker in self._form.markers:
            if self._held.startswith(marker):
                self._pass_marker(marker)
                return True
        if any(marker.startswith(self._held) for marker in self._form.markers):
            return False
        if self._held[0] in SEPARATORS:
            self._raw, self._held = self._raw + self._held[0], self._held[1:]
        elif self._held[0] == "{":
            self._scanner, self._scanned_from, self._is_told = CallScanner(), "{", False
            self._held = self._held[1:]
            self._state = _ParserState.CALL
        else:
            return self._name_first()
        return True

    def _pass_marker(self, marker: str) -> None:
        self._held = self._held[len(marker) :]
        if marker != self._form.closing:
            self._raw += marker
        else:
            if self._raw.strip(SEPARATORS):  # it held no call
                self._say(self._raw + marker)
            self._raw = ""
            self._state = _ParserState.CONTENT

    def _name_first(self) -> bool:
        found = NAMED_CALL.match(self._held) if self._form.names_first else None
        if found is not None and found[1] in self._names:
            self._held = f'"name": "{found[1]}", "arguments": {self._held[found.end() :]}'
            self._scanner, self._scanned_from, self._is_told = CallScanner(), found[0], False
            self._state = _ParserState.CALL
            return True
        might_be = self._form.names_first and re.fullmatch(r"[\w.:-]+(?:\[\w*\]?\w*){0,2}\s*", self._held)
        if found is None and might_be and len(self._held) < MAX_NAMED_CALL_CHARACTERS:
            return False
        self._give_back()
        return True

    def _in_call(self) -> bool:
        is_named = self._scanner.name is not None
        num_taken = self._scanner.feed(
            self._held if is_named else self._held[: MAX_UNNAMED_CHARACTERS - len(self._scanned_from)]
        )
        taken, self._held = self._held[:num_taken], self._held[num_taken:]
        if not is_named:
            self._scanned_from += taken
            name = self._scanner.name
            is_hopeless = self._scanner.is_broken or len(self._scanned_from) >= MAX_UNNAMED_CHARACTERS
            if name not in self._names and (name is not None or is_hopeless):
                self._held = self._scanned_from + self._held
                self._give_back()
                return True
        if self._scanner.name is None:
            return False
        self._tell_call(self._scanner.name)
        if not (self._scanner.is_done or self._scanner.is_broken):
            return bool(self._held)
        self._num_calls += 1
        self._raw = ""
        self._state = _ParserState.CALLS
        return True

    def _tell_call(self, name: str) -> None:
        arguments = self._scanner.take_arguments()
        if self._max_calls is not None and self._num_calls >= self._max_calls:
            return
        self._space = ""
        call_id = None if self._is_told else new_call_id(self._form.id_length)
        if call_id is not None or arguments:
            self._piece.calls.append(DeltaToolCall(self._num_calls, call_id, name if call_id else None, arguments))
        self._is_told = True

    def _give_back(self) -> None:
        """No call: everything since the opening is content, and so is the next character at least."""
        self._say(self._raw + self._held[0])
        self._raw, self._held = "", self._held[1:]
        self._state = _ParserState.CONTENT
