"""From what the engine core gives to what a user gets: text, stop strings, answers put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from chairlift.engine.detokenizer import Decoder, IncrementalDetokenizer, StopStrings
from chairlift.engine.input_processor import EngineRequest
from chairlift.errors import EngineDeadError, RequestError
from chairlift.outputs import CompletionOutput, EngineCoreOutput, RequestOutput, TokenLogprobs
from chairlift.request import FinishReason


@dataclass(slots=True)
class _Group:
    """All answers to one prompt. `next_prompt_logprob` is the position up to which prompt logprobs were told, if any
    were asked for: a preempted request computes them again."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    num_unfinished: int
    next_prompt_logprob: int | None


@dataclass(slots=True)
class _Sequence:
    group: _Group
    index: int
    detokenizer: IncrementalDetokenizer
    stop: StopStrings


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that ended in an error instead of an answer."""

    request_id: str
    error: Exception


class OutputProcessor:
    """Keeps what is needed to turn token ids into text, by request.

    `process` returns deltas: in each RequestOutput the text, tokens and logprobs that are new. `merge` adds them up.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._sequences: dict[str, _Sequence] = {}

    def add(self, request_id: str, prompt: str | None, requests: list[EngineRequest]) -> None:
        """Expect outputs for these siblings, under the user's `request_id`."""
        first = requests[0]
        params = first.sampling_params
        next_prompt_logprob = None if params.prompt_logprobs is None else 0
        group = _Group(request_id, prompt, first.prompt_token_ids, len(requests), next_prompt_logprob)
        for index, request in enumerate(requests):
            detokenizer = IncrementalDetokenizer(self._decoder, group.prompt_token_ids, params.skip_special_tokens)
            stop = StopStrings(params.stop, params.include_stop_str_in_output)
            self._sequences[request.request_id] = _Sequence(group, index, detokenizer, stop)

    def remove(self, request_ids: Iterable[str]) -> list[str]:
        """Forget sequences; returns those that were still expected."""
        return [request_id for request_id in request_ids if self._sequences.pop(request_id, None) is not None]

    def process(self, outputs: list[EngineCoreOutput]) -> tuple[list[RequestOutput | Failure], list[str]]:
        """Returns what to tell users, and the sequences that a stop string ended: the core has to end them too."""
        told: list[RequestOutput | Failure] = []
        stopped: list[str] = []
        for output in outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue
            if output.error is not None:
                del self._sequences[output.request_id]
                told.append(Failure(sequence.group.request_id, _failure(output)))
                continue
            delta = self._delta(sequence, output)
            if delta.outputs[0].finish_reason is not None:
                del self._sequences[output.request_id]
                if output.finish_reason is None:
                    stopped.append(output.request_id)
            told.append(delta)
        return told, stopped

    def _delta(self, sequence: _Sequence, output: EngineCoreOutput) -> RequestOutput:
        group = sequence.group
        completion = self._completion(sequence, output)
        if completion.finish_reason is not None:
            group.num_unfinished -= 1
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.prompt_token_ids,
            outputs=[completion],
            finished=group.num_unfinished == 0,
            prompt_logprobs=_prompt_logprobs(group, output),
            num_cached_tokens=output.num_cached_tokens,
            num_preemptions=output.num_preemptions,
            times=output.times,
        )

    def _completion(self, sequence: _Sequence, output: EngineCoreOutput) -> CompletionOutput:
        text = sequence.detokenizer.add(output.new_token_ids)
        finish_reason = output.finish_reason
        stop_reason: int | str | None = output.stop_token_id
        if finish_reason is not None:
            text += sequence.detokenizer.flush()
        text, stop_string = sequence.stop.add(text)
        if stop_string is not None:
            finish_reason, stop_reason = FinishReason.STOP.value, stop_string
        elif finish_reason is not None:
            text += sequence.stop.flush()
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=output.new_token_ids,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=output.logprobs,
        )


def _failure(output: EngineCoreOutput) -> Exception:
    assert output.error is not None
    return RequestError(output.error, output.error_param) if output.refused else EngineDeadError(output.error)


def _prompt_logprobs(group: _Group, output: EngineCoreOutput) -> list[TokenLogprobs | None] | None:
    """What was not told before. Position 0 has nothing before it, hence None. Only the leader's output has any."""
    start = group.next_prompt_logprob
    if start is None:
        return None
    entries: list[TokenLogprobs | None] = [None] if start == 0 else []
    if output.prompt_logprobs is not None:
        first, found = output.prompt_logprobs
        entries += found[start + len(entries) - first :]
    group.next_prompt_logprob = start + len(entries)
    return entries or None


def merge(total: RequestOutput | None, delta: RequestOutput) -> RequestOutput:
    """Add a delta to what came before it; answers by index."""
    if total is None:
        return delta
    answers = {answer.index: answer for answer in total.outputs}
    for new in delta.outputs:
        if new.index in answers:
            _extend(answers[new.index], new)
        else:
            answers[new.index] = new
    total.outputs = [answers[index] for index in sorted(answers)]
    total.finished = delta.finished
    if delta.prompt_logprobs is not None:
        total.prompt_logprobs = (total.prompt_logprobs or []) + delta.prompt_logprobs
    if delta.times is not None:
        total.times = delta.times
        total.num_preemptions += delta.num_preemptions
        if delta.outputs[0].index == 0 or not total.num_cached_tokens:
            total.num_cached_tokens = delta.num_cached_tokens
    return total


def _extend(answer: CompletionOutput, new: CompletionOutput) -> None:
    answer.text += new.text
    answer.token_ids = answer.token_ids + new.token_ids
    answer.finish_reason = new.finish_reason
    answer.stop_reason = new.stop_reason
    if new.logprobs is not None:
        answer.logprobs = (answer.logprobs or []) + new.logprobs
