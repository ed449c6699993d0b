"""OutputProcessor: turns the outputs of the engine core into deltas with text, and finds stop strings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from chairlift.engine.detokenizer import IncrementalDetokenizer, StopStrings, TokenDecoder
from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.sibling_groups import SiblingGroup, SiblingGroups
from chairlift.errors import ChairliftError, DeadlineError, RequestError
from chairlift.grammar.answer_start import AnswerStart
from chairlift.outputs import (
    CompletionOutput,
    EngineCoreOutput,
    PrefixMatch,
    RequestOutput,
    RequestStats,
    RequestTimes,
    TokenLogprobs,
)
from chairlift.request import FinishReason
from chairlift.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class _PromptGroup(SiblingGroup["_Sequence"]):
    """All answers to one prompt.

    Attributes:
        leader: has the request id of the core; `request_id` is the id that the user has chosen.
        next_prompt_logprob: the position after the last prompt logprob that was returned, because a preempted request
            computes them again; None if no prompt logprobs were requested.
    """

    leader: EngineRequest
    request_id: str
    prompt: str | None
    params: SamplingParams
    next_prompt_logprob: int | None


@dataclass(slots=True)
class _Sequence:
    """One answer.

    Attributes:
        num_tokens: the tokens after the reasoning.
    """

    group: _PromptGroup
    index: int
    detokenizer: IncrementalDetokenizer | None
    stop: StopStrings
    start: AnswerStart
    num_tokens: int = 0
    cumulative_logprob: float | None = None
    times: RequestTimes | None = None


EngineUpdate = RequestOutput | ChairliftError
"""A delta, or the error that ended a request."""


class OutputProcessor:
    """Turns outputs of the engine core into text. It keeps a detokenizer for each sequence, and finds stop strings.

    A request with `n` > 1 has `n` sequences, each with its own request id in the core.

    `process` returns deltas: each RequestOutput has the new text, tokens and logprobs of one sequence. The number of
    cached tokens is in the first delta with a token; preemptions, times and stats are in the last delta of each
    sequence. An AnswerBuilder combines the deltas.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._groups = SiblingGroups[_PromptGroup]()

    @property
    def num_unfinished(self) -> int:
        """Number of sequences that have not finished."""
        return len(self._groups)

    def add(self, request_id: str, prompt: str | None, requests: list[EngineRequest]) -> None:
        """Add siblings, whose outputs get the id `request_id` of the user."""
        leader = requests[0]
        params = leader.sampling_params
        group = _PromptGroup({}, leader, request_id, prompt, params, None if params.prompt_logprobs is None else 0)
        for index, request in enumerate(requests):
            detokenizer = None
            if params.detokenize:
                detokenizer = IncrementalDetokenizer(self._decoder, leader.prompt_token_ids, params.skip_special_tokens)
            stop = StopStrings(params.stop, params.include_stop_str_in_output)
            start = AnswerStart(params.reasoning if params.stop else None)
            group.unfinished[request.request_id] = _Sequence(group, index, detokenizer, stop, start)
        self._groups.add(group)

    def remove(self, core_ids: Iterable[str]) -> list[str]:
        """Remove sequences; returns the ids of those that had not finished."""
        unfinished = [core_id for core_id in core_ids if self._groups.get(core_id) is not None]
        self._groups.remove(unfinished)
        return unfinished

    def process(self, outputs: list[EngineCoreOutput], now: float) -> tuple[list[tuple[str, EngineUpdate]], list[str]]:
        """Process the outputs of a step.

        Returns:
            The deltas and errors, each with the leader's request id in the core; and the ids of requests that ended at
            a stop string, which the caller must abort in the core.
        """
        updates: list[tuple[str, EngineUpdate]] = []
        stopped: list[str] = []
        for output in outputs:
            group = self._groups.get(output.request_id)
            if group is None:
                continue
            if output.error is not None:
                self._groups.remove([output.request_id])
                is_late = output.finish_reason == FinishReason.TIMEOUT.value
                error = DeadlineError(output.error) if is_late else RequestError(output.error, output.error_param)
                updates.append((group.leader.request_id, error))
                continue
            delta = self._delta(group.unfinished[output.request_id], output, now)
            if delta.outputs[0].finish_reason is not None:
                delta.finished = len(self._groups.remove([output.request_id])) > 0
                if output.finish_reason is None:
                    stopped.append(output.request_id)
            updates.append((group.leader.request_id, delta))
        return updates, stopped

    def _delta(self, sequence: _Sequence, output: EngineCoreOutput, now: float) -> RequestOutput:
        group = sequence.group
        sequence.times = output.times or sequence.times
        completion = _completion(sequence, output)
        delta = RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.leader.prompt_token_ids,
            outputs=[completion],
            finished=False,
            prompt_logprobs=_prompt_logprobs(group, output),
            num_cached_tokens=output.num_cached_tokens if sequence.index == 0 else 0,
            prefix=output.prefix if sequence.index == 0 else None,
            pooled=output.pooled,
        )
        if completion.finish_reason is not None:
            delta.num_preemptions = output.num_preemptions
            if sequence.times is not None and sequence.times.finished is None:
                sequence.times = replace(sequence.times, finished=now)
            delta.times = sequence.times
            delta.stats = output.stats
        return delta


def _completion(sequence: _Sequence, output: EngineCoreOutput) -> CompletionOutput:
    """The new part of an answer. Stop strings are searched after each token, so the answer ends with the token that
    completes one, however many tokens the output has."""
    if len(output.new_token_ids) == 1 or not sequence.group.params.stop:
        return _part(sequence, output)
    answer = _Answer()
    for single in _single_tokens(output):
        part = _part(sequence, single)
        answer.add(part)
        if part.finish_reason is not None:
            break
    return answer.build()


def _single_tokens(output: EngineCoreOutput) -> Iterator[EngineCoreOutput]:
    """An output for each token; only the last one ends the request."""
    last = len(output.new_token_ids) - 1
    for index, token in enumerate(output.new_token_ids):
        logprobs = None if output.logprobs is None else output.logprobs[index : index + 1]
        single = output._replace(new_token_ids=[token], logprobs=logprobs)
        yield single if index == last else single._replace(finish_reason=None, stop_token_id=None)
    if last < 0:
        yield output


def _part(sequence: _Sequence, output: EngineCoreOutput) -> CompletionOutput:
    if output.logprobs is not None:
        before = sequence.cumulative_logprob or 0.0
        sequence.cumulative_logprob = before + sum(entry.token.logprob for entry in output.logprobs)
    reasoning, text = sequence.start.add(_new_text(sequence, output))
    finish_reason = output.finish_reason
    if finish_reason is not None:
        reasoning += sequence.start.flush()
    if sequence.start.is_found:
        sequence.num_tokens += len(output.new_token_ids)
    token_id = output.stop_token_id
    is_listed = token_id is not None and token_id in sequence.group.params.stop_token_ids
    stop_reason: int | str | None = token_id if is_listed else None
    if sequence.num_tokens >= sequence.group.params.min_tokens:
        text, stop_string = sequence.stop.add(text)
        if stop_string is not None:
            finish_reason, stop_reason = FinishReason.STOP.value, stop_string
        elif finish_reason is not None:
            text += sequence.stop.flush()
    return CompletionOutput(
        index=sequence.index,
        text=reasoning + text,
        token_ids=output.new_token_ids,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        logprobs=output.logprobs,
        cumulative_logprob=sequence.cumulative_logprob,
    )


def _new_text(sequence: _Sequence, output: EngineCoreOutput) -> str:
    if sequence.detokenizer is None:
        return ""
    hides_last = output.stop_token_id is not None and not sequence.group.params.include_stop_str_in_output
    text = sequence.detokenizer.add(output.new_token_ids[:-1] if hides_last else output.new_token_ids)
    return text if output.finish_reason is None else text + sequence.detokenizer.flush()


def _prompt_logprobs(group: _PromptGroup, output: EngineCoreOutput) -> list[TokenLogprobs | None] | None:
    """The prompt logprobs that were not returned before, with None for position 0. Only the leader has them."""
    start = group.next_prompt_logprob
    if start is None:
        return None
    entries: list[TokenLogprobs | None] = [None] if start == 0 else []
    if output.prompt_logprobs is not None:
        first, found = output.prompt_logprobs
        entries += found[start + len(entries) - first :]
    group.next_prompt_logprob = start + len(entries)
    return entries or None


@dataclass(slots=True)
class _Answer:
    """The parts of one answer, which are joined once at the end."""

    last: CompletionOutput | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None

    def add(self, new: CompletionOutput) -> None:
        self.last = new
        self.texts.append(new.text)
        self.token_ids += new.token_ids
        if new.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += new.logprobs

    def build(self) -> CompletionOutput:
        assert self.last is not None
        return replace(self.last, text="".join(self.texts), token_ids=self.token_ids, logprobs=self.logprobs)


class AnswerBuilder:
    """Adds up the deltas of a request."""

    def __init__(self) -> None:
        self._answers: defaultdict[int, _Answer] = defaultdict(_Answer)
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._last: RequestOutput | None = None
        self._num_cached_tokens = 0
        self._prefix: PrefixMatch | None = None
        self._num_preemptions = 0
        self._times: RequestTimes | None = None
        self._stats: list[RequestStats] = []

    def add(self, delta: RequestOutput) -> None:
        """Add a delta."""
        self._last = delta
        for new in delta.outputs:
            self._answers[new.index].add(new)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = self._prompt_logprobs or []
            self._prompt_logprobs += delta.prompt_logprobs
        self._num_cached_tokens += delta.num_cached_tokens
        self._prefix = delta.prefix or self._prefix
        self._num_preemptions += delta.num_preemptions
        self._times = delta.times or self._times
        if delta.stats is not None:
            self._stats.append(delta.stats)

    def build(self) -> RequestOutput:
        """The sum of all deltas, with the answers in order of their index."""
        assert self._last is not None
        return replace(
            self._last,
            outputs=[answer.build() for _index, answer in sorted(self._answers.items())],
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            prefix=self._prefix,
            num_preemptions=self._num_preemptions,
            times=self._times,
            stats=RequestStats.total(self._stats) if self._stats else None,
        )
