"""Parses answers in the harmony format of gpt-oss: messages in the channels analysis, commentary and final."""

from __future__ import annotations

import re
from typing import Final

from chairlift.server.tools.answer_parser import AnswerParser, DeltaMessage, DeltaToolCall, new_call_id, overlap

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", START)
"""Tokens after which a message is complete. A missing end is followed by the start of the next message."""

BEGINNINGS: Final = (START, CHANNEL, "to=")
"""The prompt ends with the role, so that an answer begins with a channel or a recipient."""

FINAL_HEADER: Final = CHANNEL + "final" + MESSAGE
MAX_HEADER_CHARACTERS: Final = 512
"""Longer text before a message is content, which bounds the text that is scanned repeatedly."""

RECIPIENT: Final = re.compile(r"\bto=functions\.([\w.:-]+)")


class HarmonyParser(AnswerParser):
    """Returns messages of the channel analysis as reasoning, those to a known function as tool calls, and others as
    content. Text outside of messages is content too.

    Args:
        names: the names of the known tools.
        max_calls: the maximum number of calls that are returned; later ones are dropped.
        has_reasoning: whether the channel analysis is reasoning; otherwise it is content.
    """

    def __init__(self, names: frozenset[str], max_calls: int | None = None, has_reasoning: bool = True) -> None:
        self._names = names
        self._max_calls = max_calls
        self._has_reasoning = has_reasoning
        self._held = ""
        self._is_first = True
        self._is_in_message = False
        self._part = "content"
        self._num_calls = 0
        self._has_text = False

    def feed(self, text: str) -> DeltaMessage:
        self._held += text
        piece = DeltaMessage()
        while self._read_message(piece) if self._is_in_message else self._read_header(piece):
            pass
        return piece

    def finish(self) -> DeltaMessage:
        piece = DeltaMessage()
        held, self._held = self._held, ""
        if self._is_in_message:
            self._add(piece, held)
            self._end_message(piece)
        elif self._is_first or (held.strip() and not held.lstrip().startswith(BEGINNINGS)):
            piece.content = held
        return piece

    def _read_header(self, piece: DeltaMessage) -> bool:
        """Read up to the text of the next message; return False if more text is needed."""
        text = self._held.lstrip()
        if self._is_first and text and not any(m.startswith(text) or text.startswith(m) for m in BEGINNINGS):
            self._part, self._is_in_message = "content", True
            return True
        header, marker, rest = self._held.partition(MESSAGE)
        if not marker and len(self._held) - overlap(self._held, (MESSAGE,)) <= MAX_HEADER_CHARACTERS:
            return False
        self._held, self._is_in_message, self._has_text = rest, True, False
        if not marker or len(header) > MAX_HEADER_CHARACTERS:
            self._part, self._held = "content", header + marker + rest
        else:
            self._start_message(piece, header)
        self._is_first = False
        return True

    def _start_message(self, piece: DeltaMessage, header: str) -> None:
        recipient = RECIPIENT.search(header)
        channel = header.partition(CHANNEL)[2].lstrip()
        if recipient is not None and recipient[1] in self._names:
            self._part = "call"
            if self._max_calls is not None and self._num_calls >= self._max_calls:
                self._part = "dropped call"
                return
            piece.tool_calls.append(DeltaToolCall(self._num_calls, new_call_id(), recipient[1], ""))
            self._num_calls += 1
        elif channel.startswith("analysis") and self._has_reasoning:
            self._part = "reasoning"
        else:
            self._part = "content"

    def _read_message(self, piece: DeltaMessage) -> bool:
        """Read text of the current message; return False if more text is needed."""
        found = min(((at, end) for end in ENDS if (at := self._held.find(end)) >= 0), default=None)
        if found is None:
            shown = len(self._held) - overlap(self._held, ENDS)
            self._add(piece, self._held[:shown])
            self._held = self._held[shown:]
            return False
        at, end = found
        self._add(piece, self._held[:at])
        self._end_message(piece)
        self._held = self._held[at + (0 if end == START else len(end)) :]
        self._is_first = self._is_in_message = False
        return True

    def _end_message(self, piece: DeltaMessage) -> None:
        if self._part == "call" and not self._has_text:
            self._add(piece, "{}")

    def _add(self, piece: DeltaMessage, text: str) -> None:
        if not text:
            return
        self._has_text = True
        if self._part == "content":
            piece.content += text
        elif self._part == "reasoning":
            piece.reasoning += text
        elif self._part == "call":
            piece.tool_calls.append(DeltaToolCall(self._num_calls - 1, None, None, text))
