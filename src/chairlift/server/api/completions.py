"""The endpoint /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import Raw

from chairlift.engine.pooling import check_task
from chairlift.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from chairlift.server.api.chunk_call import Choice, ChunkCall
from chairlift.server.api.endpoint import endpoint
from chairlift.server.api.engine_call import ENTRIES_PER_POSITION
from chairlift.server.api.logprobs import TextOffsets
from chairlift.server.preparation.conversation import ModelPlanner, RequestPlan
from chairlift.server.protocol.base import labelled_values
from chairlift.server.protocol.completions import CompletionRequest, CompletionResponse
from chairlift.server.protocol.encoding import encode


class CompletionCall(ChunkCall[CompletionRequest, RequestPlan]):
    id_prefix = "cmpl-"
    kinds = ("text_completion", "text_completion")

    def __init__(self, *context: Any) -> None:
        super().__init__(*context)
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(lambda: self._answer_offsets(0))
        self._echoes: list[list[TokenLogprobs | None] | None] = [
            [] if self.body.echo else None for _ in self.plan.prompts
        ]
        """The logprobs of each prompt that are still to be sent with its text; None if the prompt has been sent."""

    def add(self, output: RequestOutput) -> None:
        super().add(output)
        if self.body.is_echo_only:
            self.usage.completion_tokens = 0

    def size(self, index: int, output: RequestOutput) -> int:
        return super().size(index, output) + ENTRIES_PER_POSITION * len(self._echoes[index] or ())

    def choices(self, index: int, output: RequestOutput) -> Iterator[Choice]:
        numbers = range(index * self.num_choices, (index + 1) * self.num_choices)
        echo = self._take_echo(index, output)
        if echo is not None:
            self._offsets.update((number, self._answer_offsets(len(echo["text"]))) for number in numbers)
        if echo is not None and self.body.stream:
            yield from ({"index": number, **echo, "finish_reason": None} for number in numbers)
        for answer in output.outputs:
            if not self.body.stream:
                yield self._whole_choice(numbers[answer.index], output, answer, echo)
            elif answer.text or self.has_output(answer):
                yield self._choice(numbers[answer.index], answer)

    def _choice(self, number: int, answer: CompletionOutput) -> Choice:
        if self.body.is_echo_only:
            answer = replace(answer, text="", token_ids=[], logprobs=None, finish_reason="length")
        logprobs = self.logprobs.completion(answer.logprobs, self._offsets[number]) if answer.logprobs else None
        return self.new_choice(number, answer, text=answer.text, logprobs=logprobs)

    def _whole_choice(
        self, number: int, output: RequestOutput, answer: CompletionOutput, echo: Choice | None
    ) -> Choice:
        body, choice = self.body, self._choice(number, answer)
        parts = [choice] if echo is None else [echo, choice]
        choice["text"] = "".join(part["text"] for part in parts)
        if body.logprobs is not None:
            lists = self.logprobs.completion([], self._answer_offsets(0))
            for part in parts:
                for name, values in (part["logprobs"] or {}).items():
                    lists[name] += values
            choice["logprobs"] = Raw(encode(lists))
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = Raw(self.logprobs.prompt_json(output.prompt_logprobs))
        if body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _take_echo(self, index: int, output: RequestOutput) -> Choice | None:
        """The text and the logprobs of the prompt, once with `echo`, when they are complete; otherwise None."""
        tokenizer, token_ids, positions = self.llm.engine.tokenizer, output.prompt_token_ids, self._echoes[index]
        if positions is None:
            return None
        positions += output.prompt_logprobs or []
        has_logprobs, logprobs = self.body.logprobs is not None, None
        if has_logprobs and self.body.stream and len(positions) < len(token_ids):
            return None
        self._echoes[index] = None
        text = tokenizer.decode(token_ids, skip_special_tokens=False) if output.prompt is None else output.prompt
        if has_logprobs:
            offsets = TextOffsets.for_prompt(tokenizer, token_ids, text)
            logprobs = self.logprobs.completion(positions, offsets, token_ids[0])
        return {"text": text, "logprobs": logprobs}

    def _answer_offsets(self, start: int) -> TextOffsets:
        """The text offsets of the tokens of an answer that begins at `start`."""
        tokenizer = self.llm.engine.tokenizer
        hidden = () if self.body.skip_special_tokens is False else tokenizer.special_token_ids
        return TextOffsets(tokenizer, start, hidden)


@endpoint("/v1/completions", CompletionResponse, CompletionCall)
def create_completion(planner: ModelPlanner, body: CompletionRequest) -> RequestPlan:
    """Continue one or several prompts (OpenAI)."""
    engine = planner.engine
    check_task(engine.facts, None)
    params = body.params(engine.facts.sampling_defaults)
    encode_prompt = partial(engine.input_processor.encode, add_special_tokens=body.add_special_tokens is not False)
    prompts = [
        encode_prompt(prompt, params, label=label) for label, prompt in labelled_values("prompt", body.prompts())
    ]
    return RequestPlan(prompts, params)
