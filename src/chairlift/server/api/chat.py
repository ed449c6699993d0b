"""The endpoint /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Raw

from chairlift.outputs import CompletionOutput, RequestOutput
from chairlift.request import FinishReason
from chairlift.server.api.chunk_call import Choice, ChunkCall
from chairlift.server.api.endpoint import endpoint
from chairlift.server.preparation.conversation import ChatPlan, ModelPlanner
from chairlift.server.protocol.base import CompletionTokensDetails, UsageInfo
from chairlift.server.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from chairlift.server.tools.answer_parser import DeltaMessage, DeltaToolCall


class ChatCall(ChunkCall[ChatCompletionRequest, ChatPlan]):
    id_prefix = "chatcmpl-"
    kinds = ("chat.completion", "chat.completion.chunk")

    def __init__(self, *context: Any) -> None:
        super().__init__(*context)
        self._parsers = [self.plan.new_parser() for _ in range(self.num_choices)]
        self._reasoning: list[list[str]] = [[] for _ in self._parsers]
        self._choices_with_calls: set[int] = set()
        self._is_open = False

    def size(self, index: int, output: RequestOutput) -> int:
        held = sum(self._parsers[answer.index].num_held_tokens for answer in output.outputs)
        return super().size(index, output) + held

    def delta(self, index: int, output: RequestOutput) -> bytes:
        """The new output. The first one begins with the role of all answers, and not earlier, because clients measure
        the time to the first token by the first event."""
        opening, self._is_open = b"" if self._is_open else self._roles(), True
        return opening + super().delta(index, output)

    def _roles(self) -> bytes:
        delta = {"role": "assistant", "content": self.plan.echo}
        fields = {"delta": delta, "logprobs": None, "finish_reason": None}
        return b"".join(self.event({"index": index, **fields}) for index in range(self.num_choices))

    def response(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        response = super().response(outputs)
        if output.prompt_logprobs is not None:
            response["prompt_logprobs"] = Raw(self.logprobs.prompt_json(output.prompt_logprobs))
        if self.body.return_token_ids:
            response["prompt_token_ids"] = output.prompt_token_ids
        return response

    def total_usage(self) -> UsageInfo:
        usage = super().total_usage()
        if num_tokens := sum(self.num_tokens("".join(parts)) for parts in self._reasoning):
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=num_tokens)
        return usage

    def choices(self, _index: int, output: RequestOutput) -> Iterator[Choice]:
        for answer in output.outputs:
            piece = self._read(answer)
            content = _delta(piece) if self.body.stream else self._message(piece)
            if not content and not self.has_output(answer):
                continue
            logprobs = None
            if answer.logprobs is not None:
                logprobs = Raw(b'{"content":%b,"refusal":null}' % self.logprobs.chat_json(answer.logprobs))
            kind = "delta" if self.body.stream else "message"
            choice = self.new_choice(answer.index, answer, **{kind: content}, logprobs=logprobs)
            has_calls = answer.index in self._choices_with_calls
            if answer.finish_reason == FinishReason.STOP and has_calls and self.plan.finishes_with_tool_calls:
                choice["finish_reason"] = "tool_calls"
            yield choice

    def _read(self, answer: CompletionOutput) -> DeltaMessage:
        """The parts of new text of an answer."""
        piece = DeltaMessage.joined(self._parsers[answer.index].read(answer))
        self._reasoning[answer.index].append(piece.reasoning)
        if self.body.include_reasoning is False:
            piece.reasoning = ""
        if piece.tool_calls:
            self._choices_with_calls.add(answer.index)
        return piece

    def _message(self, piece: DeltaMessage) -> dict[str, Any]:
        content, calls = self.plan.echo + piece.content, [_call(call) for call in piece.tool_calls]
        others = {"tool_calls": calls, "reasoning_content": piece.reasoning}
        return {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
            **{name: value for name, value in others.items() if value},
        }


def _delta(piece: DeltaMessage) -> dict[str, Any]:
    calls = [{"index": call.index, **_call(call)} for call in piece.tool_calls]
    parts = {"content": piece.content, "reasoning_content": piece.reasoning, "tool_calls": calls}
    return {name: value for name, value in parts.items() if value}


def _call(call: DeltaToolCall) -> dict[str, Any]:
    """A tool call or its beginning, or without an id more of its arguments."""
    if call.id is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


@endpoint("/v1/chat/completions", ChatCompletionResponse, ChatCall)
def create_chat_completion(planner: ModelPlanner, body: ChatCompletionRequest) -> ChatPlan:
    """Generate the next message of a conversation (OpenAI)."""
    return planner.plan(body)
