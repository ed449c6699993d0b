"""POST /v1/completions."""

from __future__ import annotations

from pydantic import BaseModel

from chairlift.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from chairlift.sampling_params import SamplingParams
from chairlift.server.protocol import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Usage
from chairlift.server.serving import Call, Serving, Tally, prompt_logprobs, token_text


class CompletionServing(Serving[CompletionRequest]):
    id_prefix = "cmpl"

    def encoded(self, body: CompletionRequest) -> list[tuple[str | None, list[int]]]:
        return [self.llm.engine.input_processor.encode(prompt) for prompt in body.prompts()]

    def params(self, body: CompletionRequest) -> SamplingParams:
        return body.sampling_params(body.max_tokens, body.logprobs)

    def response(self, call: Call[CompletionRequest], outputs: list[RequestOutput]) -> Completion:
        tally = Tally()
        choices = []
        for index, output in enumerate(outputs):
            tally.add(output)
            choices += [self._choice(call, index, answer) for answer in output.outputs]
            choices[-len(output.outputs)].prompt_logprobs = prompt_logprobs(self.llm, output.prompt_logprobs)
        return self._body(call, choices, tally.usage())

    def opening(self, call: Call[CompletionRequest]) -> list[BaseModel]:
        return []

    def chunk(self, call: Call[CompletionRequest], index: int, answer: CompletionOutput) -> Completion:
        return self._body(call, [self._choice(call, index, answer)], None)

    def usage_chunk(self, call: Call[CompletionRequest], usage: Usage) -> Completion:
        return self._body(call, [], usage)

    def _body(self, call: Call[CompletionRequest], choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(id=call.id, created=call.created, model=call.model, choices=choices, usage=usage)

    def _choice(self, call: Call[CompletionRequest], index: int, answer: CompletionOutput) -> CompletionChoice:
        return CompletionChoice(
            index=call.choice_index(index, answer),
            text=answer.text,
            logprobs=self._logprobs(call, call.choice_index(index, answer), answer.logprobs),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
        )

    def _logprobs(
        self, call: Call[CompletionRequest], choice: int, positions: list[TokenLogprobs] | None
    ) -> CompletionLogprobs | None:
        if positions is None:
            return None
        logprobs = CompletionLogprobs()
        for position in positions:
            token = self._text(position.token)
            logprobs.tokens.append(token)
            logprobs.token_logprobs.append(position.token.logprob)
            logprobs.text_offset.append(call.text_offsets[choice])
            top = {self._text(entry): entry.logprob for entry in (position.token, *position.top)}
            logprobs.top_logprobs.append(top)
            call.text_offsets[choice] += len(token)
        return logprobs

    def _text(self, entry: Logprob) -> str:
        return token_text(self.llm.engine.tokenizer.token_bytes(entry.token_id))
