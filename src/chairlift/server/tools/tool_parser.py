"""Finds the tool calls in the text of an answer while it is generated."""

from __future__ import annotations

import re

from chairlift.server.tools.answer_formats import CallFormat
from chairlift.server.tools.answer_parser import DeltaMessage, MarkerParser
from chairlift.server.tools.literal_scanners import CallScanner, JsonCallScanner, LiteralCallScanner
from chairlift.server.tools.python_calls import PythonCallScanner, python_calls
from chairlift.server.tools.tag_scanner import NAME, TagCallScanner, ToolKinds

SEPARATORS = " \t\r\n,;[]"
MAX_NAMED_CALL_CHARACTERS = 200  # of a name without a brace behind it; more is no call
MAX_UNNAMED_CHARACTERS = 512  # of a call before its name or its arguments; text that is no call is scanned again

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
        self._has_content = False
        self._scanner: CallScanner = JsonCallScanner()
        self._scanned: list[str] = []  # The text of a call that is not certain yet.
        self._num_scanned = 0
        self._num_brackets = 0  # The lists of calls that are open.

    def finish(self, is_complete: bool = False) -> DeltaMessage:
        if self._advance == self._in_python:
            self._scanned.append(self._take_held())
            self._end_python(is_whole=True)
        held = self._take_held()
        if self._advance == self._in_broken_call:
            self._add_arguments(held)
        elif self._advance != self._in_call:
            text = self._raw + held
            is_after_calls = self._advance == self._between_calls and self._num_calls and not text.strip(SEPARATORS)
            self._add_content("" if is_after_calls else text)
        elif self._scanner.name is None:
            self._add_content("".join([self._raw, *self._scanned, held]))
        else:
            self._scanner.finish(held)
            self._add_arguments(held if self._scanner.is_broken else self._scanner.take_arguments())
            if is_complete and not self._scanner.is_broken:
                self._complete_arguments()
        if not self._num_calls:
            self._piece.content += self._space
        self._raw = self._space = ""
        return self._take_piece()

    def _add_content(self, text: str) -> None:
        """Add text to the content, but hold back white space at its end: a call may follow.

        Content that begins after a call begins without a line break.
        """
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown and self._num_calls and not self._has_content:
            unindented = shown.lstrip()
            shown = unindented if "\n" in shown[: -len(unindented)] else shown
        self._has_content = self._has_content or bool(shown)
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
        self._num_brackets = opening.count("[") - opening.count("]")
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
        if self._form.is_python and (self._held[0] == "[" or NAME.match(self._held)):
            self._start_call(PythonCallScanner(self._names), "")
            self._advance = self._in_python
        elif self._held[0] in SEPARATORS:
            self._take_separator()
        elif self._held[0] == "{":
            names = self._names if self._form.has_name_keys else frozenset[str]()
            self._start_call(JsonCallScanner(names), "{")
            self._held = self._held[1:]
        elif self._form.literals is not None:
            self._start_call(LiteralCallScanner(self._form.literals), "")
        elif self._form.tags is not None and NAME.match(self._held):
            self._start_call(TagCallScanner(self._form.tags, self._kinds), "")
        else:
            return self._parse_name_first()
        return True

    def _take_separator(self) -> None:
        """Read a character between calls, which becomes content if no call follows, unless it ends a list of calls."""
        separator, self._held = self._held[0], self._held[1:]
        self._raw += separator
        if separator == "[":
            self._num_brackets += 1
        elif separator == "]" and self._num_brackets:
            self._num_brackets -= 1
            self._raw = self._raw if self._raw.strip(SEPARATORS) or not self._num_calls else ""

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
        self._scanner, self._advance = scanner, self._in_call
        self._scanned, self._num_scanned = [scanned], len(scanned)

    def _in_call(self) -> bool:
        scanner = self._scanner
        if scanner.name is None:
            return self._read_unnamed_call(scanner)
        num_taken = scanner.feed(self._held)
        self._held = self._held[num_taken:]
        self._add_arguments(scanner.take_arguments())
        return self._end_call() if scanner.is_done or scanner.is_broken else bool(self._held and num_taken)

    def _read_unnamed_call(self, scanner: CallScanner) -> bool:
        limit = None if scanner.has_arguments else MAX_UNNAMED_CHARACTERS - self._num_scanned
        num_taken = scanner.feed(self._held[:limit])
        self._scanned.append(self._held[:num_taken])
        self._num_scanned += num_taken
        self._held = self._held[num_taken:]
        is_too_long = self._num_scanned >= MAX_UNNAMED_CHARACTERS
        if scanner.name is None and not (scanner.is_broken or (is_too_long and not scanner.has_arguments)):
            return bool(self._held and num_taken)
        if scanner.name not in self._names:
            if is_too_long:
                self._take_as_content()
            else:
                self._held = "".join(self._scanned) + self._held
                self._reject_call()
            return True
        self._space = ""
        self._begin_call(scanner.name or "", scanner.take_arguments(), self._call_id)
        self._call_id = None
        return self._end_call() if scanner.is_done or scanner.is_broken else bool(self._held)

    def _end_call(self) -> bool:
        """End a call. One that breaks off before the closing marker is completed; elsewhere its text stays as it is."""
        if self._scanner.is_broken and not self._has_whole_arguments():
            closing = self._form.closing or ""
            if len(self._held) < len(closing) and closing.startswith(self._held):
                return False
            if not closing or not self._held.startswith(closing):
                self._advance = self._in_broken_call
                return True
        self._complete_arguments()
        self._raw, self._advance = "", self._between_calls
        return True

    def _in_broken_call(self) -> bool:
        """Add text to arguments that are not JSON, so that the client rejects them instead of executing a part."""
        text, marker = self._take_until(self._form.markers)
        self._add_arguments(text)
        if marker is None:
            return False
        is_closing = marker == self._form.closing
        self._raw = "" if is_closing else marker
        self._advance = self._look_for_opening if is_closing else self._between_calls
        return True

    def _in_python(self) -> bool:
        """Hold back calls of Python until all of them are read: if a value is no literal, their text is content."""
        closing = self._form.closing if self._form.has_raw_strings else None
        text, marker = self._take_until((closing,) if closing else ())
        scanner = self._scanner
        is_python = not (scanner.is_done or scanner.is_broken)
        num_taken = scanner.feed(text) if is_python else len(text)
        self._scanned.append(text[:num_taken])
        self._held = text[num_taken:] + (marker or "") + self._held
        if marker is None and not (is_python and (scanner.is_done or scanner.is_broken)):
            return False
        self._end_python(is_whole=closing is None or (marker is not None and num_taken == len(text)))
        return bool(self._held)

    def _end_python(self, is_whole: bool) -> None:
        """Return the calls that were read, or their text as content if no more of it may be read (`is_whole`)."""
        text = "".join(self._scanned)
        if self._scanner.is_broken and text and not text.strip(SEPARATORS):  # A list of JSON.
            self._raw += text
            self._num_brackets += text.count("[")
            self._advance = self._between_calls
            return
        try:
            calls = python_calls(text, is_whole and self._form.has_raw_strings)
            is_known = all(name in self._names for name, _ in calls)
        except ValueError:
            is_known = False
        if is_known:
            self._space = self._raw = ""
            for name, arguments in calls:
                self._begin_call(name, arguments)
            self._advance = self._between_calls
        elif is_whole:
            self._take_as_content()

    def _take_as_content(self) -> None:
        """Return the text since the opening, and what was scanned, as content."""
        self._add_content("".join([self._raw, *self._scanned]))
        self._raw, self._advance = "", self._look_for_opening

    def _reject_call(self) -> None:
        """Return the text since the opening, and the next character, as content."""
        self._add_content(self._raw + self._held[0])
        self._raw, self._held = "", self._held[1:]
        self._advance = self._look_for_opening
