"""The parts of generated answers, which the endpoints with conversations share: reasoning, content and tool calls."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from chairlift.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from chairlift.server.api.engine_call import GeneratingCall, StreamWriter
from chairlift.server.preparation.conversation import ChatPlan
from chairlift.server.protocol.tools import FunctionCall, ToolCall
from chairlift.server.tools.answer_parser import DeltaMessage

CHARACTERS_PER_FEED: Final = 1024
"""A long answer is parsed in pieces of this size, because a parser may scan the text that it holds repeatedly."""


@dataclass(slots=True)
class AnswerItem:
    """A part of an answer: reasoning, a message or a call.

    Attributes:
        text: the text so far; for a call the arguments of the function.
        call_id, name, namespace: those of a call.
        logprobs: the logprobs of a message in the form of the endpoint, if the request includes them.
    """

    kind: Literal["reasoning", "message", "function_call", "custom_tool_call"]
    text: str = ""
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(slots=True)
class ParsedAnswer:
    """The content, the reasoning and the tool calls of one answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, piece: DeltaMessage) -> None:
        self.content += piece.content
        self.reasoning += piece.reasoning
        for delta in piece.tool_calls:
            if delta.id is not None:
                function = FunctionCall(name=delta.name or "", arguments="")
                self.tool_calls.append(ToolCall(id=delta.id, function=function))
            self.tool_calls[delta.index].function.arguments += delta.arguments

    def items(self) -> list[AnswerItem]:
        """The parts that are not empty."""
        texts = [AnswerItem("reasoning", self.reasoning), AnswerItem("message", self.content)]
        calls = ((call.id, call.function) for call in self.tool_calls)
        return [
            *(item for item in texts if item.text),
            *(AnswerItem("function_call", function.arguments, call_id, function.name) for call_id, function in calls),
        ]


def parse_answer(plan: ChatPlan, output: CompletionOutput) -> ParsedAnswer:
    """Split the text of an answer into its parts."""
    parser, text = plan.new_parser(), output.text
    answer = ParsedAnswer()
    for start in range(0, len(text), CHARACTERS_PER_FEED):
        answer.add(parser.feed(text[start : start + CHARACTERS_PER_FEED]))
    answer.add(parser.finish(output.finish_reason == "stop"))
    return answer


class ItemStreamWriter(StreamWriter):
    """The base class of streams that send the items of one answer one after another.

    Attributes:
        ended_items: the items that have ended. Their number is the index of the open item.
        open_item: the item that new text is appended to.
        last: the last output of the answer; None before the end.
    """

    def __init__(self, call: GeneratingCall[Any, ChatPlan]) -> None:
        self.call = call
        self._parser = call.plan.new_parser()
        self.ended_items: list[AnswerItem] = []
        self.open_item: AnswerItem | None = None
        self.last: CompletionOutput | None = None

    @abstractmethod
    def item_start(self, item: AnswerItem) -> bytes:
        """The events for a new item, which is empty."""

    @abstractmethod
    def item_delta(self, item: AnswerItem, text: str, positions: list[TokenLogprobs]) -> bytes:
        """The events for new text of the open item, with the logprobs of its tokens."""

    @abstractmethod
    def item_end(self, item: AnswerItem, status: str) -> bytes:
        """The events for the end of an item."""

    def delta(self, index: int, output: RequestOutput) -> bytes:
        (answer,) = output.outputs
        events = self._write_parts(self._parser.feed(answer.text), answer.logprobs or [])
        if answer.finish_reason is None:
            return events
        self.last = answer
        return events + self._write_parts(self._parser.finish(answer.finish_reason == "stop"), [])

    def _write_parts(self, piece: DeltaMessage, positions: list[TokenLogprobs]) -> bytes:
        events = self._append("reasoning", piece.reasoning, []) if piece.reasoning else b""
        is_open = self.open_item is not None and self.open_item.kind == "message"
        # The token of logprobs without text may turn out to begin another item, unless a message is open.
        if piece.content or (positions and is_open and not piece.tool_calls):
            events += self._append("message", piece.content, positions)
        for call in piece.tool_calls:
            if call.id is not None:
                events += self.start(AnswerItem("function_call", call_id=call.id, name=call.name or ""))
            if call.arguments:
                events += self._extend(call.arguments, [])
        return events

    def _append(self, kind: Literal["reasoning", "message"], text: str, positions: list[TokenLogprobs]) -> bytes:
        is_open = self.open_item is not None and self.open_item.kind == kind
        events = b"" if is_open else self.start(AnswerItem(kind))
        return events + self._extend(text, positions)

    def _extend(self, text: str, positions: list[TokenLogprobs]) -> bytes:
        item = self.open_item
        assert item is not None
        item.text += text
        return self.item_delta(item, text, positions)

    def start(self, item: AnswerItem) -> bytes:
        """End the open item, and start this one."""
        events = self.end("completed")
        self.open_item = item
        return events + self.item_start(item)

    def end(self, status: str) -> bytes:
        """End the open item, if any."""
        item, self.open_item = self.open_item, None
        if item is None:
            return b""
        events = self.item_end(item, status)
        self.ended_items.append(item)
        return events
