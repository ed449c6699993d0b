"""POST /v1/chat/completions."""

from __future__ import annotations

from pydantic import BaseModel

from chairlift.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from chairlift.sampling_params import SamplingParams
from chairlift.server.protocol import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatLogprob,
    ChatLogprobs,
    Delta,
    TopLogprob,
    Usage,
)
from chairlift.server.serving import Call, Serving, Tally, prompt_logprobs, token_text


class ChatServing(Serving[ChatCompletionRequest]):
    id_prefix = "chatcmpl"

    def encoded(self, body: ChatCompletionRequest) -> list[tuple[str | None, list[int]]]:
        messages = [message.for_template() for message in body.messages]
        return [self.llm.engine.input_processor.encode_chat(messages, **body.template_options())]

    def params(self, body: ChatCompletionRequest) -> SamplingParams:
        return body.sampling_params(body.limit(), body.num_logprobs())

    def response(self, call: Call[ChatCompletionRequest], outputs: list[RequestOutput]) -> ChatCompletion:
        (output,) = outputs
        tally = Tally()
        tally.add(output)
        return ChatCompletion(
            id=call.id,
            created=call.created,
            model=call.model,
            choices=[self._choice(answer) for answer in output.outputs],
            usage=tally.usage(),
            prompt_logprobs=prompt_logprobs(self.llm, output.prompt_logprobs),
        )

    def opening(self, call: Call[ChatCompletionRequest]) -> list[BaseModel]:
        role = Delta(role="assistant", content="")
        choices = [ChatChunkChoice(index=index, delta=role) for index in range(call.body.n or 1)]
        return [self._chunk(call, [choice]) for choice in choices]

    def chunk(self, call: Call[ChatCompletionRequest], index: int, answer: CompletionOutput) -> ChatChunk:
        choice = ChatChunkChoice(
            index=answer.index,
            delta=Delta(content=answer.text or None),
            logprobs=self._logprobs(answer.logprobs),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
        )
        return self._chunk(call, [choice])

    def usage_chunk(self, call: Call[ChatCompletionRequest], usage: Usage) -> ChatChunk:
        return self._chunk(call, [], usage)

    def _chunk(
        self, call: Call[ChatCompletionRequest], choices: list[ChatChunkChoice], usage: Usage | None = None
    ) -> ChatChunk:
        return ChatChunk(id=call.id, created=call.created, model=call.model, choices=choices, usage=usage)

    def _choice(self, answer: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=answer.index,
            message=AnswerMessage(content=answer.text),
            logprobs=self._logprobs(answer.logprobs),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
        )

    def _logprobs(self, positions: list[TokenLogprobs] | None) -> ChatLogprobs | None:
        if positions is None:
            return None
        content = [
            ChatLogprob(**self._entry(position.token).model_dump(), top_logprobs=[self._entry(e) for e in position.top])
            for position in positions
        ]
        return ChatLogprobs(content=content)

    def _entry(self, entry: Logprob) -> TopLogprob:
        token = self.llm.engine.tokenizer.token_bytes(entry.token_id)
        return TopLogprob(token=token_text(token), logprob=entry.logprob, bytes=list(token))
