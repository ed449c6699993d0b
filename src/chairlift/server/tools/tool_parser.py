"""Finds the tool calls in the text of an answer while it is generated."""

from __future__ import annotations

import re
from collections.abc import Callable

from chairlift.server.tools.answer_parser import AnswerParser, DeltaMessage, DeltaToolCall, new_call_id, overlap
from chairlift.server.tools.call_formats import CallFormat
from chairlift.server.tools.call_scanner import CallScanner
from chairlift.server.tools.gemma_call_scanner import GemmaCallScanner
from chairlift.server.tools.python_call_scanner import PythonCallScanner

SEPARATORS = " \t\r\n,;[]"
NAMED_CALL = re.compile(r"([A-Za-z0-9_.:-]{1,128})(?:\[CALL_ID\]\w{1,32})?(?:\[ARGS\])?\s*(?={)")
MAX_NAMED_CALL_CHARACTERS = 200
"""A name that is not followed by a brace within this many characters does not begin a call."""

MAX_UNNAMED_CHARACTERS = 512
"""An object without a name in this many characters is not a call. The limit bounds the text that is scanned twice."""


class ToolParser(AnswerParser):
    """Splits one answer into content and tool calls.

    Text that is not a valid call of a known tool is returned unchanged, as content. White space around calls is
    removed. The states are: content -> between calls -> in a call -> between calls ... -> content.

    Args:
        names: the names of the known tools.
        max_calls: the maximum number of calls that are returned; later ones are dropped.
    """

    def __init__(self, form: CallFormat, names: frozenset[str], max_calls: int | None = None) -> None:
        self._form = form
        self._names = names
        self._max_calls = max_calls
        self._advance: Callable[[], bool] = self._start
        """Processes one element of the held text in the current state; returns False if more text is needed."""
        self._held = ""
        self._raw = ""  # The text since the opening or the last call: content, if no call follows.
        self._space = ""
        self._scanner: CallScanner | PythonCallScanner | GemmaCallScanner = CallScanner()
        self._scanned_from = ""
        self._has_call_started = False
        self._num_calls = 0
        self._piece = DeltaMessage()

    def feed(self, text: str) -> DeltaMessage:
        self._held += text
        while self._advance():
            pass
        return self._take()

    def finish(self) -> DeltaMessage:
        if self._advance == self._in_call and self._scanner.name is None:
            self._raw += self._scanned_from
        if self._advance != self._in_call or self._scanner.name is None:
            is_between = self._advance == self._between_calls and not (self._raw + self._held).strip(SEPARATORS)
            if not (is_between and self._num_calls):
                self._add_content(self._raw + self._held)
        if not self._num_calls:
            self._piece.content += self._space
        self._held = self._raw = self._space = ""
        return self._take()

    def _take(self) -> DeltaMessage:
        piece, self._piece = self._piece, DeltaMessage()
        return piece

    def _add_content(self, text: str) -> None:
        """Add text to the content, but hold back white space at its end: a call may follow."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._piece.content += shown

    def _start(self) -> bool:
        text = self._held.lstrip()
        if not text:
            return False
        self._advance = self._look_for_opening
        is_opening = any(m.startswith(text) or text.startswith(m) for m in self._form.openings)
        if self._form.is_bare and text[0] in "{[" and not is_opening:
            self._raw, self._held = self._held[: -len(text)], text
            self._advance = self._between_calls
        return True

    def _look_for_opening(self) -> bool:
        found = min(((at, -len(m), m) for m in self._form.openings if (at := self._held.find(m)) >= 0), default=None)
        if found is None:
            keep = overlap(self._held, self._form.openings)
            self._add_content(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return False
        at, _, opening = found
        self._add_content(self._held[:at])
        self._raw, self._held = opening, self._held[at + len(opening) :]
        self._advance = self._between_calls
        return True

    def _between_calls(self) -> bool:
        if not self._held:
            return False
        for marker in sorted(self._form.markers, key=len):  # A fence closes with the beginning of its opening.
            if self._held.startswith(marker):
                self._consume_marker(marker)
                return True
        if any(marker.startswith(self._held) for marker in self._form.markers):
            return False
        if self._held[0] in SEPARATORS:
            self._raw, self._held = self._raw + self._held[0], self._held[1:]
        elif self._held[0] == "{":
            self._start_call(CallScanner(), "{")
            self._held = self._held[1:]
        elif self._form.is_pythonic and (self._held[0].isalpha() or self._held[0] == "_"):
            self._start_call(PythonCallScanner(), "")
        elif self._form.is_gemma and self._held[0] == "c":
            self._start_call(GemmaCallScanner(), "")
        else:
            return self._parse_name_first()
        return True

    def _consume_marker(self, marker: str) -> None:
        self._held = self._held[len(marker) :]
        if marker != self._form.closing:
            self._raw += marker
        else:
            if self._raw.strip(SEPARATORS) or not self._num_calls:  # There was no call between the markers.
                self._add_content(self._raw + marker)
            self._raw = ""
            self._advance = self._look_for_opening

    def _parse_name_first(self) -> bool:
        found = NAMED_CALL.match(self._held) if self._form.names_first else None
        if found is not None and found[1] in self._names:
            self._held = f'"name": "{found[1]}", "arguments": {self._held[found.end() :]}'
            self._start_call(CallScanner(), found[0])
            return True
        might_be = self._form.names_first and re.fullmatch(r"[\w.:-]+(?:\[\w*\]?\w*){0,2}\s*", self._held)
        if found is None and might_be and len(self._held) < MAX_NAMED_CALL_CHARACTERS:
            return False
        self._reject_call()
        return True

    def _start_call(self, scanner: CallScanner | PythonCallScanner | GemmaCallScanner, scanned: str) -> None:
        self._scanner, self._scanned_from, self._has_call_started = scanner, scanned, False
        self._advance = self._in_call

    def _in_call(self) -> bool:
        is_named = self._scanner.name is not None
        num_taken = self._scanner.feed(
            self._held if is_named else self._held[: MAX_UNNAMED_CHARACTERS - len(self._scanned_from)]
        )
        taken, self._held = self._held[:num_taken], self._held[num_taken:]
        if not is_named:
            self._scanned_from += taken
            name = self._scanner.name
            cannot_be_named = self._scanner.is_broken or len(self._scanned_from) >= MAX_UNNAMED_CHARACTERS
            if name not in self._names and (name is not None or cannot_be_named):
                self._held = self._scanned_from + self._held
                self._reject_call()
                return True
        if self._scanner.name is None:
            return False
        self._add_call_delta(self._scanner.name)
        if not (self._scanner.is_done or self._scanner.is_broken):
            return bool(self._held)
        self._num_calls += 1
        self._raw = ""
        self._advance = self._between_calls
        return True

    def _add_call_delta(self, name: str) -> None:
        arguments = self._scanner.take_arguments()
        if self._max_calls is not None and self._num_calls >= self._max_calls:
            return
        self._space = ""
        call_id = None if self._has_call_started else new_call_id(self._form.id_length)
        if call_id is not None or arguments:
            self._piece.tool_calls.append(DeltaToolCall(self._num_calls, call_id, name if call_id else None, arguments))
        self._has_call_started = True

    def _reject_call(self) -> None:
        """Return the text since the opening, and the next character, as content."""
        self._add_content(self._raw + self._held[0])
        self._raw, self._held = "", self._held[1:]
        self._advance = self._look_for_opening
