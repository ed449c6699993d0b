"""The endpoint /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import Raw

from chairlift.engine.served_engine import ServedEngine
from chairlift.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from chairlift.server.api.logprobs import LogprobWriter, TextOffsets
from chairlift.server.api.serving import (
    ENTRIES_PER_POSITION,
    ApiCall,
    ChunkStreamWriter,
    Serving,
    StreamWriter,
    output_size,
)
from chairlift.server.api.stream_chunks import NULL, encode
from chairlift.server.preparation.request_plan import RequestPlan, attribute_errors_to
from chairlift.server.protocol.completions import CompletionRequest, CompletionResponse, CompletionResponseChoice

CompletionCall = ApiCall[CompletionRequest, RequestPlan]


def plan_completion(engine: ServedEngine, body: CompletionRequest) -> RequestPlan:
    """Plan a request of /v1/completions; raises RequestError."""
    with attribute_errors_to(body.constraint_field):
        params = body.params(engine.facts.sampling_defaults)
    encode_prompt = partial(engine.input_processor.encode, add_special_tokens=body.add_special_tokens is not False)
    return RequestPlan([encode_prompt(prompt, params) for prompt in body.prompts()], params, body.constraint_field)


class CompletionServing(Serving[CompletionRequest, RequestPlan]):
    """Answers /v1/completions."""

    id_prefix = "cmpl-"

    def response(self, call: CompletionCall, outputs: list[RequestOutput]) -> CompletionResponse:
        choices = []
        for index, output in enumerate(outputs):
            best = _best_answers(output.outputs, call.body.num_choices())
            choices += [self._choice(call, index, output, answer) for answer in best]
        if call.body.is_echo_only:
            call.usage.completion_tokens = 0
        return CompletionResponse(
            id=call.id,
            created=call.created,
            model=call.model,
            choices=choices,
            usage=call.usage.usage(),
            timings=call.usage.timings() if call.body.timings else None,
        )

    def writer(self, call: CompletionCall) -> StreamWriter:
        return _CompletionStream(self, call)

    def echo_text(self, body: CompletionRequest, output: RequestOutput) -> str:
        """The text of the prompt with `echo`, or an empty string."""
        if not body.echo:
            return ""
        if output.prompt is not None:
            return output.prompt
        return self.llm.engine.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def echo_logprobs(
        self,
        writer: LogprobWriter,
        body: CompletionRequest,
        output: RequestOutput,
        positions: Sequence[TokenLogprobs | None],
    ) -> dict[str, list[Any]]:
        """The logprobs of the prompt with `echo`, or empty lists."""
        tokenizer, token_ids = self.llm.engine.tokenizer, output.prompt_token_ids
        if not body.echo:
            return writer.completion([], TextOffsets(tokenizer))
        offsets = TextOffsets.for_prompt(tokenizer, token_ids, self.echo_text(body, output))
        return writer.completion(positions, offsets, token_ids[0])

    def answer_offsets(self, body: CompletionRequest, start: int) -> TextOffsets:
        """The text offsets of the tokens of an answer that begins at `start`."""
        tokenizer = self.llm.engine.tokenizer
        hidden = () if body.skip_special_tokens is False else tokenizer.special_token_ids
        return TextOffsets(tokenizer, start, hidden)

    def _choice(
        self, call: CompletionCall, index: int, output: RequestOutput, answer: CompletionOutput
    ) -> CompletionResponseChoice:
        body = call.body
        if body.is_echo_only:
            answer = replace(answer, text="", token_ids=[], logprobs=answer.logprobs and [], finish_reason="length")
        writer = self.logprob_writer(body.return_tokens_as_token_ids)
        logprobs: Raw | None = None
        prompt_logprobs: Raw | None = None
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            prompt_logprobs = Raw(writer.prompt_json(output.prompt_logprobs))
        if body.logprobs is not None:
            lists = self.echo_logprobs(writer, body, output, output.prompt_logprobs or [])
            offsets = self.answer_offsets(body, len(self.echo_text(body, output)))
            for name, values in writer.completion(answer.logprobs or [], offsets).items():
                lists[name] += values
            logprobs = Raw(encode(lists))
        return CompletionResponseChoice.model_construct(
            index=index * body.num_choices() + answer.index,
            text=self.echo_text(body, output) + answer.text,
            logprobs=logprobs,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
            token_ids=answer.token_ids if body.return_token_ids else None,
        )


def _best_answers(answers: list[CompletionOutput], count: int) -> list[CompletionOutput]:
    """The `count` answers with the highest mean logprob per token, in descending order, as OpenAI ranks them."""
    if len(answers) <= count:
        return answers
    ranked = sorted(answers, key=_mean_logprob, reverse=True)[:count]
    return [replace(answer, index=index) for index, answer in enumerate(ranked)]


def _mean_logprob(answer: CompletionOutput) -> float:
    logprobs = answer.logprobs or []
    return sum(position.token.logprob for position in logprobs) / max(1, len(logprobs))


class _CompletionStream(ChunkStreamWriter[CompletionRequest, RequestPlan]):
    """Writes the chunks of one completion."""

    def __init__(self, serving: CompletionServing, call: CompletionCall) -> None:
        body = call.body
        super().__init__("text_completion", call, serving.logprob_writer(body.return_tokens_as_token_ids))
        self._serving = serving
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(lambda: serving.answer_offsets(body, 0))
        self._echoes: list[list[TokenLogprobs | None] | None] = [[] if body.echo else None for _ in call.generations]
        """The logprobs of each prompt that are still to be sent with its text; None if the prompt has been sent."""

    def size(self, index: int, output: RequestOutput) -> int:
        return output_size(output) + ENTRIES_PER_POSITION * len(self._echoes[index] or ())

    def delta(self, index: int, output: RequestOutput) -> bytes:
        chunks, positions = b"", self._echoes[index]
        if positions is not None:
            positions += output.prompt_logprobs or []
            if self.call.body.logprobs is None or len(positions) == len(output.prompt_token_ids):
                self._echoes[index] = None
                chunks = self._echo(index, output, positions)
        return chunks + super().delta(index, output)

    def closing(self) -> bytes:
        if self.call.body.is_echo_only:
            self.call.usage.completion_tokens = 0
        return super().closing()

    def _echo(self, index: int, output: RequestOutput, positions: list[TokenLogprobs | None]) -> bytes:
        body = self.call.body
        text = self._serving.echo_text(body, output)
        chunks = []
        for choice in range(index * body.num_choices(), (index + 1) * body.num_choices()):
            logprobs = NULL
            if body.logprobs is not None:
                logprobs = encode(self._serving.echo_logprobs(self.logprobs, body, output, positions))
                self._offsets[choice] = self._serving.answer_offsets(body, len(text))
            chunks.append(self.chunk(choice, b'"text":%b' % encode(text), logprobs))
        return b"".join(chunks)

    def answer(self, index: int, answer: CompletionOutput) -> bytes:
        body = self.call.body
        choice = index * body.num_choices() + answer.index
        text, positions, reason = answer.text, answer.logprobs, answer.finish_reason
        if body.is_echo_only:
            text, positions, reason = "", None, "length"
        logprobs = encode(self.logprobs.completion(positions, self._offsets[choice])) if positions else NULL
        return self.chunk(choice, b'"text":%b' % encode(text), logprobs, answer, reason)
