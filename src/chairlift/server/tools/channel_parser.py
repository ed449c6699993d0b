"""Parses answers that are messages in channels: in the harmony format of gpt-oss, and of Muse Glimmer."""

from __future__ import annotations

import re
from typing import Final

from chairlift.grammar.answer_start import overlap
from chairlift.server.tools.answer_formats import MESSAGE, START, CallFormat
from chairlift.server.tools.answer_parser import DeltaMessage, MarkerParser
from chairlift.server.tools.reasoning_parser import without_last_break
from chairlift.server.tools.tag_scanner import ToolKinds
from chairlift.server.tools.tool_parser import NO_KINDS, ToolParser

MAX_HEADER_CHARACTERS: Final = 512
"""Longer text before a message is content, which bounds the text that is scanned repeatedly."""


class ChannelParser(MarkerParser):
    """Returns messages of reasoning as reasoning, those to a tool as tool calls, and others as content. Text outside of
    messages is content too. Arguments that are not between tags are returned as they are written.

    Args:
        has_reasoning: whether reasoning is returned as such; otherwise it is content.
    """

    def __init__(
        self,
        form: CallFormat,
        names: frozenset[str],
        max_calls: int | None = None,
        has_reasoning: bool = True,
        kinds: ToolKinds = NO_KINDS,
    ) -> None:
        super().__init__(self._in_header, names, max_calls)
        assert form.channels is not None
        self._channels = form.channels
        self._tagged = ToolParser(form, names, max_calls, kinds) if form.tags else None
        self._has_reasoning = has_reasoning
        self._is_first = True
        self._part = "content"
        self._space = ""  # The end of the reasoning, which more reasoning may follow.

    def finish(self, is_complete: bool = False) -> DeltaMessage:
        held = self._take_held()
        if self._advance == self._in_message:
            self._add(held)
            if self._part == "call" and (is_complete or not self._written):
                self._complete_arguments()
        elif self._is_first or (held.strip() and not held.lstrip().startswith(self._channels.beginnings)):
            self._piece.content += held
        self._end_reasoning()
        if self._tagged is not None:
            self._piece = DeltaMessage.joined([self._piece, self._tagged.finish(is_complete)])
        return self._take_piece()

    def _in_header(self) -> bool:
        """Read up to the text of the next message."""
        text = self._held.lstrip()
        if (
            self._is_first
            and text
            and not any(m.startswith(text) or text.startswith(m) for m in self._channels.beginnings)
        ):
            self._advance = self._in_message
            return True
        header, marker, rest = self._held.partition(MESSAGE)
        if not marker and len(self._held) - overlap(self._held, (MESSAGE,)) <= MAX_HEADER_CHARACTERS:
            return False
        self._advance, self._is_first = self._in_message, False
        if not marker or len(header) > MAX_HEADER_CHARACTERS:
            self._part = "content"
        else:
            self._held = rest
            self._start_message(header)
        return True

    def _start_message(self, header: str) -> None:
        call = re.search(self._channels.call, header)
        if call is not None and self._tagged is not None:
            self._part = "tagged"
        elif call is not None and call[1] in self._names:
            self._part = "call"
            self._begin_call(call[1])
        elif re.search(self._channels.reasoning, header) and self._has_reasoning:
            self._part = "reasoning"
            return
        else:
            self._part = "content"
        self._end_reasoning()

    def _in_message(self) -> bool:
        text, end = self._take_until(self._channels.ends)
        self._add(text)
        if end is None:
            return False
        if self._part == "call":
            self._complete_arguments()
        if end == START:  # It belongs to the header of the next message.
            self._held = START + self._held
        self._advance, self._is_first = self._in_header, False
        return True

    def _end_reasoning(self) -> None:
        self._piece.reasoning += without_last_break(self._space)
        self._space = ""

    def _add(self, text: str) -> None:
        if self._part == "content":
            self._piece.content += text
        elif self._part == "reasoning":
            text = self._space + text
            self._piece.reasoning += (shown := text.rstrip())
            self._space = text[len(shown) :]
        elif self._part == "tagged" and self._tagged is not None:
            self._piece = DeltaMessage.joined([self._piece, self._tagged.feed(text)])
        else:
            self._add_arguments(text)
