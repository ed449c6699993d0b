"""The endpoint /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from msgspec import Raw

from chairlift.engine.pooling import check_task
from chairlift.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from chairlift.server.api.endpoint import Endpoint
from chairlift.server.api.engine_call import (
    ENTRIES_PER_POSITION,
    ChunkStreamWriter,
    GeneratingCall,
    StreamWriter,
    output_size,
)
from chairlift.server.api.logprobs import LogprobWriter, TextOffsets
from chairlift.server.preparation.conversation import ModelPlanner
from chairlift.server.preparation.request_plan import RequestPlan, attribute_errors_to
from chairlift.server.protocol.chunks import ChunkChoice, encode
from chairlift.server.protocol.completions import CompletionRequest, CompletionResponse, CompletionResponseChoice


def _plan(planner: ModelPlanner, body: CompletionRequest) -> RequestPlan:
    engine = planner.engine
    check_task(engine.facts, None)
    with attribute_errors_to(body.constraint_field):
        params = body.params(engine.facts.sampling_defaults)
    encode_prompt = partial(engine.input_processor.encode, add_special_tokens=body.add_special_tokens is not False)
    prompts = [encode_prompt(prompt, params) for prompt in body.prompts()]
    return RequestPlan(prompts, params, body.constraint_field, clamps_max_tokens=planner.options.clamp_max_tokens)


class CompletionCall(GeneratingCall[CompletionRequest, RequestPlan]):
    """One call of /v1/completions."""

    def response(self, outputs: list[RequestOutput]) -> CompletionResponse:
        choices = [
            self._choice(index, output, answer) for index, output in enumerate(outputs) for answer in output.outputs
        ]
        if self.body.is_echo_only:
            self.usage.completion_tokens = 0
        return CompletionResponse(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.usage.usage(),
            timings=self.usage.timings() if self.body.timings else None,
        )

    def writer(self) -> StreamWriter:
        return _CompletionStream(self)

    def echo_text(self, output: RequestOutput) -> str:
        """The text of the prompt with `echo`, or an empty string."""
        if not self.body.echo:
            return ""
        if output.prompt is not None:
            return output.prompt
        return self.llm.engine.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def echo_logprobs(
        self, writer: LogprobWriter, output: RequestOutput, positions: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """The logprobs of the prompt with `echo`, or empty lists."""
        tokenizer, token_ids = self.llm.engine.tokenizer, output.prompt_token_ids
        if not self.body.echo:
            return writer.completion([], TextOffsets(tokenizer))
        offsets = TextOffsets.for_prompt(tokenizer, token_ids, self.echo_text(output))
        return writer.completion(positions, offsets, token_ids[0])

    def answer_offsets(self, start: int) -> TextOffsets:
        """The text offsets of the tokens of an answer that begins at `start`."""
        tokenizer = self.llm.engine.tokenizer
        hidden = () if self.body.skip_special_tokens is False else tokenizer.special_token_ids
        return TextOffsets(tokenizer, start, hidden)

    def _choice(self, index: int, output: RequestOutput, answer: CompletionOutput) -> CompletionResponseChoice:
        body, echo = self.body, self.echo_text(output)
        if body.is_echo_only:
            answer = replace(answer, text="", token_ids=[], logprobs=answer.logprobs and [], finish_reason="length")
        writer = self.logprob_writer(body.return_tokens_as_token_ids)
        logprobs: Raw | None = None
        prompt_logprobs: Raw | None = None
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            prompt_logprobs = Raw(writer.prompt_json(output.prompt_logprobs))
        if body.logprobs is not None:
            lists = self.echo_logprobs(writer, output, output.prompt_logprobs or [])
            for name, values in writer.completion(answer.logprobs or [], self.answer_offsets(len(echo))).items():
                lists[name] += values
            logprobs = Raw(encode(lists))
        return CompletionResponseChoice.model_construct(
            index=index * body.num_choices() + answer.index,
            text=echo + answer.text,
            logprobs=logprobs,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
            token_ids=answer.token_ids if body.return_token_ids else None,
        )


class _CompletionStream(ChunkStreamWriter[CompletionRequest, RequestPlan]):
    """Writes the chunks of one completion."""

    call: CompletionCall

    def __init__(self, call: CompletionCall) -> None:
        super().__init__("text_completion", call)
        self._num_choices, self._is_echo_only = call.body.num_choices(), call.body.is_echo_only
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(lambda: call.answer_offsets(0))
        self._echoes: list[list[TokenLogprobs | None] | None] = [
            [] if call.body.echo else None for _ in call.generations
        ]
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
        if self._is_echo_only:
            self.call.usage.completion_tokens = 0
        return super().closing()

    def _echo(self, index: int, output: RequestOutput, positions: list[TokenLogprobs | None]) -> bytes:
        body = self.call.body
        text = self.call.echo_text(output)
        chunks = []
        for number in range(index * self._num_choices, (index + 1) * self._num_choices):
            choice = ChunkChoice(number, text=text)
            if body.logprobs is not None:
                choice.logprobs = self.call.echo_logprobs(self.logprobs, output, positions)
                self._offsets[number] = self.call.answer_offsets(len(text))
            chunks.append(self.chunk(choice))
        return b"".join(chunks)

    def answer(self, index: int, answer: CompletionOutput) -> bytes:
        number = index * self._num_choices + answer.index
        choice = ChunkChoice(number, text=answer.text, finish_reason=answer.finish_reason)
        if self._is_echo_only:
            choice.text, choice.finish_reason = "", "length"
        elif answer.logprobs:
            choice.logprobs = self.logprobs.completion(answer.logprobs, self._offsets[number])
        return self.chunk(choice, answer)


COMPLETIONS: Final = Endpoint(
    "/v1/completions",
    "create_completion",
    "Continue one or several prompts (OpenAI).",
    CompletionRequest,
    CompletionResponse,
    _plan,
    CompletionCall.serve,
    id_prefix="cmpl-",
)
