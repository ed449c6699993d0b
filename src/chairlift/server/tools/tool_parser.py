"""Finds the tool calls in the text of an answer while it is generated."""

from __future__ import annotations

import re

from chairlift.server.tools.answer_formats import CallFormat
from chairlift.server.tools.answer_parser import DeltaMessage, MarkerParser
from chairlift.server.tools.literal_scanners import CallScanner, JsonCallScanner, LiteralCallScanner
from chairlift.server.tools.tag_scanner import NAME, TagCallScanner, ToolKinds

SEPARATORS = " \t\r\n,;[]"
MAX_NAMED_CALL_CHARACTERS = 200  # of a name without a brace behind it; more is no call
MAX_UNNAMED_CHARACTERS = 512  # of a call before its name is known, which may be scanned twice

NO_KINDS: ToolKinds = {}


class ToolParser(MarkerParser):
    """Splits one answer into content and tool calls.

    Text that is not a valid call of a known tool is returned unchanged, as content. White space around calls is
    removed. The states are: content -> between calls -> in a call -> between calls ... -> content.
    """

    def __init__(
        self, form: CallFormat, names: frozenset[str], max_calls: int | None = None, kinds: ToolKinds = NO_KINDS
    ) -> None:
        super().__init__(self._start, names, max_calls, form.id_length)
        self._form, self._kinds = form, kinds
        self._call_id: str | None = None
        self._raw = ""  # The text since the opening or the last call: content, if no call follows.
        self._space = ""
        self._scanner: CallScanner = JsonCallScanner()
        self._scanned_from = ""

    def finish(self, is_complete: bool = False) -> DeltaMessage:
        held = self._take_held()
        if self._advance != self._in_call:
            text = self._raw + held
            is_after_calls = self._advance == self._between_calls and self._num_calls and not text.strip(SEPARATORS)
            self._add_content("" if is_after_calls else text)
        elif self._scanner.name is None:
            self._add_content(self._raw + self._scanned_from + held)
        else:
            self._scanner.finish(held)
            self._add_arguments(self._scanner.take_arguments())
            if is_complete:
                self._complete_arguments()
        if not self._num_calls:
            self._piece.content += self._space
        self._raw = self._space = ""
        return self._take_piece()

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
        text, opening = self._take_until(self._form.openings)
        self._add_content(text)
        if opening is None:
            return False
        self._raw, self._advance = opening, self._between_calls
        return True

    def _between_calls(self) -> bool:
        if not self._held:
            return False
        markers = (*self._form.markers, *self._form.skipped)
        for marker in sorted(markers, key=len):  # A fence closes with the beginning of its opening.
            if self._held.startswith(marker):
                self._consume_marker(marker)
                return True
        if any(marker.startswith(self._held) for marker in markers):
            return False
        if self._held[0] in SEPARATORS:
            self._raw, self._held = self._raw + self._held[0], self._held[1:]
        elif self._held[0] == "{":
            self._start_call(JsonCallScanner(), "{")
            self._held = self._held[1:]
        elif self._form.literals is not None:
            self._start_call(LiteralCallScanner(self._form.literals), "")
        elif self._form.tags is not None and NAME.match(self._held):
            self._start_call(TagCallScanner(self._form.tags, self._kinds), "")
        else:
            return self._parse_name_first()
        return True

    def _consume_marker(self, marker: str) -> None:
        self._held = self._held[len(marker) :]
        if marker != self._form.closing:
            self._raw += "" if self._num_calls and marker in self._form.skipped else marker
        else:
            if self._raw.strip(SEPARATORS) or not self._num_calls:  # There was no call between the markers.
                self._add_content(self._raw + marker)
            self._raw = ""
            self._advance = self._look_for_opening

    def _parse_name_first(self) -> bool:
        form = self._form.named
        found = re.match(form, self._held) if form else None
        if found is not None and found["name"] in self._names:
            self._held = f'"name": "{found["name"]}", "arguments": {self._held[found.end() :]}'
            self._call_id = found.groupdict().get("id")
            self._start_call(JsonCallScanner(), found[0])
            return True
        if form and found is None and "{" not in self._held and len(self._held) < MAX_NAMED_CALL_CHARACTERS:
            return False
        self._reject_call()
        return True

    def _start_call(self, scanner: CallScanner, scanned: str) -> None:
        self._scanner, self._scanned_from = scanner, scanned
        self._advance = self._in_call

    def _in_call(self) -> bool:
        scanner = self._scanner
        if scanner.name is not None:
            num_taken = scanner.feed(self._held)
            self._held = self._held[num_taken:]
            self._add_arguments(scanner.take_arguments())
        else:
            num_taken = scanner.feed(self._held[: MAX_UNNAMED_CHARACTERS - len(self._scanned_from)])
            self._scanned_from += self._held[:num_taken]
            self._held = self._held[num_taken:]
            cannot_be_named = scanner.is_broken or len(self._scanned_from) >= MAX_UNNAMED_CHARACTERS
            if scanner.name is None and not cannot_be_named:
                return False
            if scanner.name is None or scanner.name not in self._names:
                self._held = self._scanned_from + self._held
                self._reject_call()
                return True
            self._space = ""
            self._begin_call(scanner.name, scanner.take_arguments(), self._call_id)
            self._call_id = None
        if not (scanner.is_done or scanner.is_broken):
            return bool(self._held and num_taken)
        self._complete_arguments()
        self._raw = ""
        self._advance = self._between_calls
        return True

    def _reject_call(self) -> None:
        """Return the text since the opening, and the next character, as content."""
        self._add_content(self._raw + self._held[0])
        self._raw, self._held = "", self._held[1:]
        self._advance = self._look_for_opening
