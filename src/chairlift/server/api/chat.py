"""The endpoint /v1/chat/completions."""

from __future__ import annotations

from typing import Final

from msgspec import Raw

from chairlift.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from chairlift.request import FinishReason
from chairlift.server.api.answers import ParsedAnswer, parse_answer
from chairlift.server.api.endpoint import Endpoint
from chairlift.server.api.engine_call import ChunkStreamWriter, GeneratingCall, StreamWriter
from chairlift.server.api.logprobs import LogprobWriter
from chairlift.server.preparation.conversation import ChatPlan, ModelPlanner
from chairlift.server.protocol.base import CompletionTokensDetails, UsageInfo
from chairlift.server.protocol.chat import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatResponseMessage,
)
from chairlift.server.protocol.chunks import ChatDelta, ChunkChoice, FunctionChunk, ToolCallChunk
from chairlift.server.tools.answer_parser import AnswerParser, DeltaToolCall


def finish_reason(plan: ChatPlan, reason: str | None, has_calls: bool) -> str | None:
    """The finish reason in the response: that of the engine, or `tool_calls`."""
    return "tool_calls" if reason == FinishReason.STOP and has_calls and plan.finishes_with_tool_calls else reason


class ChatCall(GeneratingCall[ChatCompletionRequest, ChatPlan]):
    """One call of /v1/chat/completions."""

    def response(self, outputs: list[RequestOutput]) -> ChatCompletionResponse:
        (output,) = outputs
        body = self.body
        answers = [parse_answer(self.plan, answer) for answer in output.outputs]
        writer = self.logprob_writer(body.return_tokens_as_token_ids)
        prompt_logprobs = output.prompt_logprobs
        return ChatCompletionResponse.model_construct(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(*pair, writer) for pair in zip(output.outputs, answers, strict=True)],
            usage=self.usage_with(sum(self.num_tokens(answer.reasoning) for answer in answers)),
            prompt_logprobs=None if prompt_logprobs is None else Raw(writer.prompt_json(prompt_logprobs)),
            prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
            timings=self.usage.timings() if body.timings else None,
        )

    def writer(self) -> StreamWriter:
        return _ChatStream(self)

    def usage_with(self, num_reasoning_tokens: int) -> UsageInfo:
        """The token counts, with the number of tokens of reasoning."""
        usage = self.usage.usage()
        if num_reasoning_tokens:
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=num_reasoning_tokens)
        return usage

    def _choice(
        self, output: CompletionOutput, answer: ParsedAnswer, writer: LogprobWriter
    ) -> ChatCompletionResponseChoice:
        content = self.plan.echo + answer.content
        reasoning = answer.reasoning if self.body.include_reasoning is not False else ""
        message = ChatResponseMessage(
            content=content if content or not answer.tool_calls else None,
            tool_calls=answer.tool_calls or None,
            reasoning_content=reasoning or None,
        )
        return ChatCompletionResponseChoice.model_construct(
            index=output.index,
            message=message,
            logprobs=None if output.logprobs is None else _logprobs(writer, output.logprobs),
            finish_reason=finish_reason(self.plan, output.finish_reason, bool(answer.tool_calls)),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self.body.return_token_ids else None,
        )


class _ChatStream(ChunkStreamWriter[ChatCompletionRequest, ChatPlan]):
    """Writes the chunks of one chat."""

    call: ChatCall

    def __init__(self, call: ChatCall) -> None:
        super().__init__("chat.completion.chunk", call)
        self._parsers = [call.plan.new_parser() for _ in range(call.body.num_choices())]
        self._choices_with_calls: set[int] = set()
        self._reasoning: list[str] = []

    def opening(self) -> bytes:
        delta = ChatDelta(role="assistant", content=self.call.plan.echo)
        return b"".join(self.chunk(ChunkChoice(index, delta=delta)) for index in range(self.call.body.num_choices()))

    def usage(self) -> UsageInfo:
        return self.call.usage_with(self.call.num_tokens("".join(self._reasoning)))

    def answer(self, _index: int, answer: CompletionOutput) -> bytes:
        delta = self._parse(self._parsers[answer.index], answer)
        is_empty = delta == ChatDelta() and answer.logprobs is None and not self._has_token_ids
        if is_empty and answer.finish_reason is None:
            return b""
        choice = ChunkChoice(answer.index, delta=delta)
        choice.finish_reason = finish_reason(
            self.call.plan, answer.finish_reason, answer.index in self._choices_with_calls
        )
        if answer.logprobs is not None:
            choice.logprobs = _logprobs(self.logprobs, answer.logprobs)
        return self.chunk(choice, answer)

    def _parse(self, parser: AnswerParser, answer: CompletionOutput) -> ChatDelta:
        """Parse new text of an answer."""
        parts = [parser.feed(answer.text)]
        if answer.finish_reason is not None:
            parts.append(parser.finish(answer.finish_reason == "stop"))
        reasoning = "".join(part.reasoning for part in parts)
        self._reasoning.append(reasoning)
        calls = [_call_chunk(call) for part in parts for call in part.tool_calls]
        if calls:
            self._choices_with_calls.add(answer.index)
        return ChatDelta(
            content="".join(part.content for part in parts) or None,
            reasoning_content=(reasoning or None) if self.call.body.include_reasoning is not False else None,
            tool_calls=calls or None,
        )


def _call_chunk(call: DeltaToolCall) -> ToolCallChunk:
    chunk = ToolCallChunk(call.index, function=FunctionChunk(arguments=call.arguments))
    if call.name is not None:
        chunk.function.name = call.name
    if call.id is not None:
        chunk.id, chunk.type = call.id, "function"
    return chunk


def _logprobs(writer: LogprobWriter, positions: list[TokenLogprobs]) -> Raw:
    """The logprobs of a choice (see `ChatLogprobs`)."""
    return Raw(b'{"content":%b,"refusal":null}' % writer.chat_json(positions))


CHAT_COMPLETIONS: Final = Endpoint(
    "/v1/chat/completions",
    "create_chat_completion",
    "Generate the next message of a conversation (OpenAI).",
    ChatCompletionRequest,
    ChatCompletionResponse,
    ModelPlanner.plan,
    ChatCall.serve,
    id_prefix="chatcmpl-",
)
