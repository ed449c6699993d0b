"""The base class of responses and messages, whose answers consist of items: reasoning, a message and calls."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

from chairlift.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from chairlift.server.api.engine_call import Fields, GeneratingCall
from chairlift.server.preparation.conversation import ChatPlan
from chairlift.server.tools.answer_parser import DeltaMessage


@dataclass(slots=True)
class AnswerItem:
    """A part of an answer: reasoning, a message or a call.

    Attributes:
        text: the text so far; for a call the arguments of the function.
        logprobs: the logprobs of a message in the form of the endpoint, if the request includes them.
        status: `in_progress`, and after its end `completed` or `incomplete`.
    """

    kind: Literal["reasoning", "message", "function_call", "custom_tool_call"]
    text: str = ""
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    status: str = "in_progress"


class ItemCall(GeneratingCall[Fields, ChatPlan]):
    """The base class of calls whose answer is one item after another. A whole response has the items of its events.

    Attributes:
        ended_items: the items that have ended. Their number is the index of the open item.
        open_item: the item that new text is appended to.
        last: the last output of the answer, which has its finish reason.
    """

    last: CompletionOutput

    def __init__(self, *context: Any) -> None:
        super().__init__(*context)
        self._parser = self.plan.new_parser()
        self.ended_items: list[AnswerItem] = []
        self.open_item: AnswerItem | None = None

    @abstractmethod
    def item_start(self, item: AnswerItem) -> bytes:
        """The events for a new item, which is empty."""

    @abstractmethod
    def item_delta(self, item: AnswerItem, text: str, positions: list[TokenLogprobs]) -> bytes:
        """The events for new text of the open item, with the logprobs of its tokens."""

    @abstractmethod
    def item_end(self, item: AnswerItem) -> bytes:
        """The events for the end of an item."""

    @abstractmethod
    def finished(self) -> Any:
        """The whole response, after the end of the last item."""

    def response(self, outputs: list[RequestOutput]) -> Any:
        self.delta(0, outputs[0])
        self.end_answer()
        return self.finished()

    def size(self, index: int, output: RequestOutput) -> int:
        return super().size(index, output) + self._parser.num_held_tokens

    def delta(self, _index: int, output: RequestOutput) -> bytes:
        (self.last,) = output.outputs
        events, positions = b"", self.last.logprobs or []
        pieces = self._parser.read(self.last)
        for piece in pieces if self.body.stream else [DeltaMessage.joined(pieces)]:
            events += self._write_parts(piece, positions)
            positions = []
        return events

    def _write_parts(self, piece: DeltaMessage, positions: list[TokenLogprobs]) -> bytes:
        events, calls = b"", piece.tool_calls
        while calls and calls[0].id is None:  # The end of a call is before new parts.
            events += self.extend(calls.pop(0).arguments, [])
        if piece.reasoning:
            events += self._append("reasoning", piece.reasoning, [])
        is_open = self.open_item is not None and self.open_item.kind == "message"
        # The token of logprobs without text may turn out to begin another item, unless a message is open.
        if piece.content or (positions and is_open and not calls):
            events += self._append("message", piece.content, positions)
        for call in calls:
            if call.id is not None:
                events += self.start(AnswerItem("function_call", call_id=call.id, name=call.name or ""))
            if call.arguments:
                events += self.extend(call.arguments, [])
        return events

    def _append(self, kind: Literal["reasoning", "message"], text: str, positions: list[TokenLogprobs]) -> bytes:
        if self.open_item is not None and self.open_item.kind == kind:
            return self.extend(text, positions)
        is_after_call = self.open_item is not None and self.open_item.kind != "reasoning"
        events = self.start(AnswerItem(kind))
        return events + self.extend(text.lstrip("\n") if is_after_call else text, positions)

    def extend(self, text: str, positions: list[TokenLogprobs]) -> bytes:
        """Append text to the open item, with the logprobs of its tokens."""
        item = self.open_item
        assert item is not None
        item.text += text
        return self.item_delta(item, text, positions)

    def start(self, item: AnswerItem) -> bytes:
        """End the open item, and start this one."""
        events = self.end("completed")
        self.open_item = item
        return events + self.item_start(item)

    def end_answer(self) -> bytes:
        """End the last item."""
        return self.end("completed")

    def end(self, status: str) -> bytes:
        """End the open item, if any."""
        item, self.open_item = self.open_item, None
        if item is None:
            return b""
        item.status = status
        events = self.item_end(item)
        self.ended_items.append(item)
        return events
