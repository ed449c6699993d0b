"""An executor that computes nothing: it asks a cost model how long the step takes and moves a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chairlift.clock import VirtualClock
from chairlift.lab.sim.cost_model import CostModel, StepShape, num_causal_pairs, num_padding_pairs
from chairlift.outputs import ModelRunnerOutput, NewRequest, SchedulerOutput

Tokens = Callable[[str, int], int]
"""The output token of a request (by id) at an index from 0: a recording to be replayed."""

ZERO = [0]
"""What is sampled without a recording; shared by everybody, never changed."""


@dataclass(slots=True)
class _Prefill:
    """A row that has `num_known` tokens and has computed fewer."""

    num_computed: int
    num_known: int


class SimExecutor:
    """Answers every step with its number of tokens, at the time that a cost model gives.

    A step that decodes costs no Python per row. The length of a decoding row is kept as the clock of decodes minus
    the row's birth on it, so that one tick lengthens all of them, and what they read is one product:

        length(row) = ticks - birth(row)          sum of lengths = rows * ticks - sum of births

    A row that sits a step out is born one tick later. Rows behind their last known token are few, and looped over.

    Sampled tokens are 0 unless `tokens` replays a recording. They enter the block hashes of the prefix cache, after
    the prompt's, so requests with different prompts never share a block by them; two with the same prompt then share
    their answers' blocks as well, as they would under greedy sampling.
    """

    def __init__(self, cost_model: CostModel, clock: VirtualClock, tokens: Tokens | None = None) -> None:
        self._cost_model = cost_model
        self._clock = clock
        self._tokens = tokens
        self._prefills: dict[str, _Prefill] = {}
        self._births: dict[str, int] = {}
        self._births_sum = 0
        self._ticks = 0
        self._num_prompt_tokens: dict[str, int] = {}
        self._ready_time = 0.0
        self.num_steps = 0

    def submit(self, output: SchedulerOutput) -> tuple[ModelRunnerOutput, float]:
        """Queue a step behind those that are still being computed; the handle says when it will be done."""
        for request_id in output.removed:
            self._forget(request_id)
        for new in output.new_requests:
            self._introduce(new)
        shape, token_ids = self._advance(output)
        if self._tokens is not None:
            token_ids = self._recorded(token_ids, self._tokens)
        self._ready_time = max(self._ready_time, self._clock.now()) + self._cost_model.seconds(shape)
        self.num_steps += 1
        return ModelRunnerOutput(output.step, token_ids), self._ready_time

    def result(self, handle: tuple[ModelRunnerOutput, float]) -> ModelRunnerOutput:
        """Move the clock to when the step is done."""
        output, ready_time = handle
        self._clock.advance(max(0.0, ready_time - self._clock.now()))
        return output

    def _introduce(self, new: NewRequest) -> None:
        self._prefills[new.request_id] = _Prefill(new.num_computed_tokens, len(new.token_ids))
        if self._tokens is not None:
            self._num_prompt_tokens[new.request_id] = new.num_prompt_tokens

    def _forget(self, request_id: str) -> None:
        if self._prefills.pop(request_id, None) is None:
            self._births_sum -= self._births.pop(request_id)
        self._num_prompt_tokens.pop(request_id, None)

    def _advance(self, output: SchedulerOutput) -> tuple[StepShape, dict[str, list[int]]]:
        """Lengthen the scheduled rows; the step's shape, and a token for whoever has caught up."""
        scheduled = output.num_scheduled_tokens
        token_ids = dict.fromkeys(scheduled, ZERO)
        padding = output.num_padding_tokens
        only_padding = [request_id for request_id in padding if not scheduled[request_id]]
        for request_id in only_padding:
            del token_ids[request_id]
        padded_lengths = {request_id: self._length(request_id) for request_id in only_padding}
        self._ticks += 1
        absent_context = self._hold(token_ids) if len(token_ids) < len(self._births) + len(self._prefills) else 0
        decode_context = len(self._births) * self._ticks - self._births_sum - absent_context
        prefill_context, prefill_pairs = self._prefill(scheduled, token_ids) if self._prefills else (0, 0)
        padded_pairs = sum(num_padding_pairs(length, padding[rid]) for rid, length in padded_lengths.items())
        return StepShape(
            num_tokens=sum(scheduled.values()) + sum(padding.values()),
            num_seqs=len(scheduled),
            num_sampled=len(token_ids) + sum(length > 0 for length in padded_lengths.values()),
            num_context=decode_context + prefill_context + sum(padded_lengths.values()),
            num_pairs=decode_context + prefill_pairs + padded_pairs,
        ), token_ids

    def _length(self, request_id: str) -> int:
        """Tokens that a row has computed."""
        row = self._prefills.get(request_id)
        return self._ticks - self._births[request_id] if row is None else row.num_computed

    def _hold(self, present: dict[str, list[int]]) -> int:
        """Decoding rows that sit this step out keep their length; returns how long they are together."""
        absent = self._births.keys() - present.keys()
        for request_id in absent:
            self._births[request_id] += 1
        self._births_sum += len(absent)
        return sum(self._ticks - self._births[request_id] for request_id in absent)

    def _prefill(self, scheduled: dict[str, int], token_ids: dict[str, list[int]]) -> tuple[int, int]:
        """Advance the rows behind their last known token; what they read, and their pairs."""
        context = pairs = 0
        caught_up: list[str] = []
        for request_id, row in self._prefills.items():
            count = scheduled.get(request_id, 0)
            if not count:
                continue
            pairs += num_causal_pairs(row.num_computed, count)
            row.num_computed += count
            context += row.num_computed
            assert row.num_computed <= row.num_known, "a token is computed once, after it is known"
            if row.num_computed == row.num_known:
                caught_up.append(request_id)
            else:
                del token_ids[request_id]
        for request_id in caught_up:
            self._births[request_id] = self._ticks - self._prefills.pop(request_id).num_known
            self._births_sum += self._births[request_id]
        return context, pairs

    def _recorded(self, token_ids: dict[str, list[int]], tokens: Tokens) -> dict[str, list[int]]:
        """The recording's tokens instead: the row's length is the index of the next one."""
        lengths = {rid: self._length(rid) for rid in token_ids}
        return {rid: [tokens(rid, length - self._num_prompt_tokens[rid])] for rid, length in lengths.items()}
