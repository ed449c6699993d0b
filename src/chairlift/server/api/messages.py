"""The endpoints /v1/messages and /v1/messages/count_tokens of Anthropic's API."""

from __future__ import annotations

from typing import Any, Final

from chairlift.outputs import TokenLogprobs
from chairlift.request import FinishReason
from chairlift.server.api.endpoint import endpoint
from chairlift.server.api.item_call import AnswerItem, ItemCall
from chairlift.server.preparation.conversation import ChatPlan, ModelPlanner
from chairlift.server.protocol.base import ErrorInfo
from chairlift.server.protocol.encoding import encode, to_event
from chairlift.server.protocol.messages import (
    CountTokensRequest,
    MessagesError,
    MessagesRequest,
    MessagesResponse,
    MessagesUsage,
    TokenCount,
)
from chairlift.server.protocol.tools import parse_arguments

DELTAS: Final = {
    "reasoning": ("thinking_delta", "thinking"),
    "message": ("text_delta", "text"),
    "function_call": ("input_json_delta", "partial_json"),
}
"""Kind of item -> the type of its deltas, and their field with text."""


class MessagesCall(ItemCall[MessagesRequest]):
    """One call of /v1/messages. Its stream is message_start, then blocks (start, deltas, stop), then message_delta and
    message_stop."""

    id_prefix = "msg_"
    ping = to_event("ping")

    def opening(self) -> bytes:
        return to_event("message_start", message=self._message([], None, None))

    def closing(self) -> bytes:
        events = self.end_answer()
        reason, sequence = self._stop_reason()
        ending = {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": self._usage()}
        if (timings := self.timings()) is not None:
            ending["timings"] = timings
        return events + to_event("message_delta", **ending) + to_event("message_stop")

    def finished(self) -> MessagesResponse:
        message = self._message(list(map(_block, self.ended_items)), *self._stop_reason())
        message.timings = self.timings()
        return message

    def failure(self, status: int, info: ErrorInfo) -> bytes:
        return to_event("error", error=MessagesError.of(status, info).error)

    def item_start(self, item: AnswerItem) -> bytes:
        return to_event("content_block_start", index=len(self.ended_items), content_block=_block(item))

    def item_delta(self, item: AnswerItem, text: str, positions: list[TokenLogprobs]) -> bytes:
        kind, name = DELTAS[item.kind]
        delta = {"type": kind, name: text}
        return to_event("content_block_delta", index=len(self.ended_items), delta=delta)

    def item_end(self, item: AnswerItem) -> bytes:
        return to_event("content_block_stop", index=len(self.ended_items))

    def _message(self, content: list[dict[str, Any]], reason: str | None, sequence: str | None) -> MessagesResponse:
        return MessagesResponse(
            id=self.id,
            model=self.model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self._usage(),
        )

    def _stop_reason(self) -> tuple[str, str | None]:
        """The `stop_reason` of the answer, and the stop sequence that ended it, if any."""
        if self.last.finish_reason == FinishReason.LENGTH:
            return "max_tokens", None
        if any(item.kind == "function_call" for item in self.ended_items):
            return "tool_use", None
        if isinstance(self.last.stop_reason, str):
            return "stop_sequence", self.last.stop_reason
        return "end_turn", None

    def _usage(self) -> MessagesUsage:
        usage = self.usage
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            cache_miss=usage.cache_miss,
        )


def _block(item: AnswerItem) -> dict[str, Any]:
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    if item.kind == "message":
        return {"type": "text", "text": item.text}
    return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": parse_arguments(item.text)}


@endpoint("/v1/messages", MessagesResponse, MessagesCall)
def create_message(planner: ModelPlanner, body: MessagesRequest) -> ChatPlan:
    """Generate the next message of a conversation (Anthropic)."""
    return planner.plan(body)


@endpoint("/v1/messages/count_tokens", TokenCount)
def count_tokens(planner: ModelPlanner, body: CountTokensRequest) -> bytes:
    """Count the prompt tokens of a conversation (Anthropic)."""
    return encode(TokenCount(input_tokens=len(planner.prompt_token_ids(body))))
