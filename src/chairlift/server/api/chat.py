"""The endpoint /v1/chat/completions."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import Raw

from chairlift.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from chairlift.request import FinishReason
from chairlift.server.api.logprobs import LogprobWriter
from chairlift.server.api.serving import ApiCall, ChunkStreamWriter, Serving, StreamWriter
from chairlift.server.api.stream_chunks import NULL, encode
from chairlift.server.preparation.conversation import ChatPlan
from chairlift.server.protocol.base import CompletionTokensDetails, UsageInfo
from chairlift.server.protocol.chat import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatResponseMessage,
)
from chairlift.server.protocol.tools import FunctionCall, ToolCall
from chairlift.server.tools.answer_parser import AnswerParser, DeltaMessage, DeltaToolCall

ChatCall = ApiCall[ChatCompletionRequest, ChatPlan]


CHARACTERS_PER_FEED: Final = 1024
"""A long answer is parsed in pieces of this size, because a parser may scan the text that it holds repeatedly."""


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


def parse_answer(plan: ChatPlan, text: str) -> ParsedAnswer:
    """Split the text of a complete answer into its parts."""
    parser = plan.make_parser()
    answer = ParsedAnswer()
    for start in range(0, len(text), CHARACTERS_PER_FEED):
        answer.add(parser.feed(text[start : start + CHARACTERS_PER_FEED]))
    answer.add(parser.finish())
    return answer


def _chat_usage(call: ChatCall, num_reasoning_tokens: int) -> UsageInfo:
    usage = call.usage.usage()
    if num_reasoning_tokens:
        usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=num_reasoning_tokens)
    return usage


class PartStreamWriter(StreamWriter):
    """The base class of streams that send the parts of one answer one after another.

    Attributes:
        last: the last output of the answer; None before the end.
    """

    def __init__(self, call: ApiCall[Any, ChatPlan]) -> None:
        self._parser = call.plan.make_parser()
        self.last: CompletionOutput | None = None

    @abstractmethod
    def reasoning(self, text: str) -> bytes:
        """The events for new reasoning."""

    @abstractmethod
    def content(self, text: str, positions: list[TokenLogprobs]) -> bytes:
        """The events for new content, which may be empty, with the logprobs of its tokens."""

    @abstractmethod
    def tool_call(self, call: DeltaToolCall) -> bytes:
        """The events for a new tool call, or for new arguments of the last one."""

    def delta(self, index: int, output: RequestOutput) -> bytes:
        (answer,) = output.outputs
        events = self._parts(self._parser.feed(answer.text), answer.logprobs or [])
        if answer.finish_reason is None:
            return events
        self.last = answer
        return events + self._parts(self._parser.finish(), [])

    def _parts(self, piece: DeltaMessage, positions: list[TokenLogprobs]) -> bytes:
        events = self.reasoning(piece.reasoning) if piece.reasoning else b""
        if piece.content or not piece.tool_calls:
            events += self.content(piece.content, positions)
        return events + b"".join(map(self.tool_call, piece.tool_calls))


def finish_reason(plan: ChatPlan, reason: str | None, has_calls: bool) -> str | None:
    """The finish reason in the response: that of the engine, or `tool_calls`."""
    return "tool_calls" if reason == FinishReason.STOP and has_calls and plan.finishes_with_tool_calls else reason


def chat_logprobs_json(writer: LogprobWriter, positions: list[TokenLogprobs]) -> bytes:
    """The logprobs of a choice as JSON (see `ChatLogprobs`)."""
    return b'{"content":%b,"refusal":null}' % writer.chat_json(positions)


class ChatServing(Serving[ChatCompletionRequest, ChatPlan]):
    """Answers /v1/chat/completions."""

    id_prefix = "chatcmpl-"

    def response(self, call: ChatCall, outputs: list[RequestOutput]) -> ChatCompletionResponse:
        (output,) = outputs
        body = call.body
        answers = [parse_answer(call.plan, answer.text) for answer in output.outputs]
        writer = self.logprob_writer(body.return_tokens_as_token_ids)
        prompt_logprobs = output.prompt_logprobs
        return ChatCompletionResponse.model_construct(
            id=call.id,
            created=call.created,
            model=call.model,
            choices=[self._choice(call, *pair, writer) for pair in zip(output.outputs, answers, strict=True)],
            usage=_chat_usage(call, sum(self.num_tokens(answer.reasoning) for answer in answers)),
            prompt_logprobs=None if prompt_logprobs is None else Raw(writer.prompt_json(prompt_logprobs)),
            prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
            timings=call.usage.timings() if body.timings else None,
        )

    def writer(self, call: ChatCall) -> StreamWriter:
        return _ChatStream(self, call)

    def _choice(
        self, call: ChatCall, output: CompletionOutput, answer: ParsedAnswer, writer: LogprobWriter
    ) -> ChatCompletionResponseChoice:
        content = call.plan.echo + answer.content
        message = ChatResponseMessage(
            content=content if content or not answer.tool_calls else None,
            tool_calls=answer.tool_calls or None,
            reasoning_content=answer.reasoning
            if answer.reasoning and call.body.include_reasoning is not False
            else None,
        )
        logprobs = None if output.logprobs is None else Raw(chat_logprobs_json(writer, output.logprobs))
        return ChatCompletionResponseChoice.model_construct(
            index=output.index,
            message=message,
            logprobs=logprobs,
            finish_reason=finish_reason(call.plan, output.finish_reason, bool(answer.tool_calls)),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if call.body.return_token_ids else None,
        )


class _ChatStream(ChunkStreamWriter[ChatCompletionRequest, ChatPlan]):
    """Writes the chunks of one chat. The text is not parsed if the request has neither tools nor reasoning."""

    def __init__(self, serving: ChatServing, call: ChatCall) -> None:
        super().__init__("chat.completion.chunk", call, serving.logprob_writer(call.body.return_tokens_as_token_ids))
        self._serving = serving
        new_parser = call.plan.new_parser
        self._parsers = None if new_parser is None else [new_parser() for _ in range(call.body.num_choices())]
        self._choices_with_calls: set[int] = set()
        self._reasoning: list[str] = []

    def opening(self) -> bytes:
        delta = b'"delta":{"role":"assistant","content":%b}' % encode(self.call.plan.echo)
        return b"".join(self.chunk(index, delta, NULL) for index in range(self.call.body.num_choices()))

    def usage(self) -> UsageInfo:
        return _chat_usage(self.call, self._serving.num_tokens("".join(self._reasoning)))

    def answer(self, _index: int, answer: CompletionOutput) -> bytes:
        logprobs = NULL if answer.logprobs is None else chat_logprobs_json(self.logprobs, answer.logprobs)
        if self._parsers is None:
            delta = b'{"content":%b}' % encode(answer.text) if answer.text else b"{}"
        else:
            delta = self._parse(self._parsers[answer.index], answer)
        is_empty = delta == b"{}" and answer.logprobs is None and not self.call.body.return_token_ids
        if is_empty and answer.finish_reason is None:
            return b""
        reason = finish_reason(self.call.plan, answer.finish_reason, answer.index in self._choices_with_calls)
        return self.chunk(answer.index, b'"delta":%b' % delta, logprobs, answer, reason)

    def _parse(self, parser: AnswerParser, answer: CompletionOutput) -> bytes:
        """Parse new text of an answer, and return its `delta`."""
        deltas = [parser.feed(answer.text)]
        if answer.finish_reason is not None:
            deltas.append(parser.finish())
        fields: dict[str, Any] = {"content": "".join(delta.content for delta in deltas)}
        reasoning = "".join(delta.reasoning for delta in deltas)
        if reasoning:
            self._reasoning.append(reasoning)
        if self.call.body.include_reasoning is not False:
            fields["reasoning_content"] = reasoning
        if calls := [_call_delta(call) for delta in deltas for call in delta.tool_calls]:
            self._choices_with_calls.add(answer.index)
            fields["tool_calls"] = calls
        return encode({name: value for name, value in fields.items() if value})


def _call_delta(call: DeltaToolCall) -> dict[str, Any]:
    function = {"arguments": call.arguments} if call.name is None else {"name": call.name, "arguments": call.arguments}
    if call.id is None:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
