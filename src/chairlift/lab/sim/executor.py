"""An executor for simulation, which advances a virtual clock by the duration of each step and computes no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chairlift.clock import VirtualClock
from chairlift.lab.sim.cost_model import CostModel, StepShape, num_causal_pairs, num_padding_pairs
from chairlift.outputs import ModelRunnerOutput, NewRequest, SchedulerOutput

TokenRecording = Callable[[str, int], int]
"""Returns the recorded output token of a request, by its id and the index of the token from 0."""

ZERO_TOKEN = [0]
"""The sampled tokens without a recording; one list that all requests share and that must not be changed."""


@dataclass(slots=True)
class _PrefillRow:
    """A row that has computed fewer tokens than it has."""

    num_computed: int
    num_known: int


class SimExecutor:
    """Implements `Executor` without a model: a step takes the seconds of a cost model on a virtual clock.

    A decode step needs no Python loop over its rows. The length of a decoding row is the number of decode ticks minus
    the tick of its birth, so one tick adds a token to all rows, and their context is one product:

        length(row) = ticks - birth(row)          sum of lengths = rows * ticks - sum of births

    The birth of a row that is not scheduled in a step moves one tick later. The few rows in prefill are looped over.

    Without the recording `tokens`, every sampled token is 0. This adds no hits of the prefix cache between requests
    with different prompts, because the hash of a block includes all tokens before it. Requests with equal prompts have
    equal outputs, as under greedy sampling, and share their blocks.
    """

    def __init__(self, cost_model: CostModel, clock: VirtualClock, tokens: TokenRecording | None = None) -> None:
        self._cost_model = cost_model
        self._clock = clock
        self._tokens = tokens
        self._prefills: dict[str, _PrefillRow] = {}
        self._births: dict[str, int] = {}
        self._births_sum = 0
        self._ticks = 0
        self._num_prompt_tokens: dict[str, int] = {}
        self._ready_time = 0.0
        self.num_steps = 0

    def submit(self, output: SchedulerOutput) -> tuple[ModelRunnerOutput, float]:
        """Starts a step after those in progress; the handle has its output and its end on the virtual clock."""
        for request_id in output.removed:
            self._remove_row(request_id)
        for new in output.new_requests:
            self._add_row(new)
        assert not output.draft_token_ids or self._tokens is not None, "draft tokens need a recording"
        shape, token_ids = self._advance(output)
        if self._tokens is not None:
            token_ids = self._recorded_tokens(token_ids, self._tokens, output.draft_token_ids)
        self._ready_time = max(self._ready_time, self._clock.now()) + self._cost_model.seconds(shape)
        self.num_steps += 1
        return ModelRunnerOutput(output.step, token_ids), self._ready_time

    def result(self, handle: tuple[ModelRunnerOutput, float]) -> ModelRunnerOutput:
        """Advances the clock to the end of the step, and returns its output."""
        output, ready_time = handle
        self._clock.advance(max(0.0, ready_time - self._clock.now()))
        return output

    def _add_row(self, new: NewRequest) -> None:
        self._prefills[new.request_id] = _PrefillRow(new.num_computed_tokens, len(new.token_ids))
        if self._tokens is not None:
            self._num_prompt_tokens[new.request_id] = new.num_prompt_tokens

    def _remove_row(self, request_id: str) -> None:
        if self._prefills.pop(request_id, None) is None:
            self._births_sum -= self._births.pop(request_id)
        self._num_prompt_tokens.pop(request_id, None)

    def _advance(self, output: SchedulerOutput) -> tuple[StepShape, dict[str, list[int]]]:
        """Adds the scheduled tokens to the rows; returns the shape of the step and the sampled tokens."""
        scheduled = output.num_scheduled_tokens
        token_ids = dict.fromkeys(scheduled, ZERO_TOKEN)
        padding = output.num_padding_tokens
        only_padding = [request_id for request_id in padding if not scheduled[request_id]]
        for request_id in only_padding:
            del token_ids[request_id]
        padded_lengths = {request_id: self._length(request_id) for request_id in only_padding}
        self._ticks += 1
        has_absent_rows = len(token_ids) < len(self._births) + len(self._prefills)
        absent_context = self._hold_absent_rows(token_ids) if has_absent_rows else 0
        decode_context = len(self._births) * self._ticks - self._births_sum - absent_context
        num_drafts = {request_id: len(drafts) for request_id, drafts in output.draft_token_ids.items()}
        prefill_context, prefill_pairs = 0, 0
        if self._prefills:
            known = {request_id: count - num_drafts.get(request_id, 0) for request_id, count in scheduled.items()}
            prefill_context, prefill_pairs = self._advance_prefills(known, token_ids)
        padded_pairs = sum(num_padding_pairs(length, padding[rid]) for rid, length in padded_lengths.items())
        draft_pairs = sum(num_causal_pairs(self._length(request_id), count) for request_id, count in num_drafts.items())
        draft_context = sum(num_drafts.values())
        return StepShape(
            num_tokens=sum(scheduled.values()) + sum(padding.values()),
            num_seqs=len(scheduled),
            num_sampled=len(token_ids) + draft_context + sum(length > 0 for length in padded_lengths.values()),
            num_context=decode_context + prefill_context + draft_context + sum(padded_lengths.values()),
            num_pairs=decode_context + prefill_pairs + draft_pairs + padded_pairs,
        ), token_ids

    def _length(self, request_id: str) -> int:
        """Returns the number of tokens that a row has computed."""
        row = self._prefills.get(request_id)
        return self._ticks - self._births[request_id] if row is None else row.num_computed

    def _hold_absent_rows(self, present: dict[str, list[int]]) -> int:
        """Keeps the length of decoding rows that are not in this step, and returns the sum of their lengths."""
        absent = self._births.keys() - present.keys()
        for request_id in absent:
            self._births[request_id] += 1
        self._births_sum += len(absent)
        return sum(self._ticks - self._births[request_id] for request_id in absent)

    def _advance_prefills(self, scheduled: dict[str, int], token_ids: dict[str, list[int]]) -> tuple[int, int]:
        """Advances the rows in prefill; returns the context that they read and their (query, key) pairs."""
        context = pairs = 0
        caught_up: list[str] = []
        for request_id, row in self._prefills.items():
            count = scheduled.get(request_id, 0)
            if not count:
                continue
            pairs += num_causal_pairs(row.num_computed, count)
            row.num_computed += count
            context += row.num_computed
            assert row.num_computed <= row.num_known, "a row computes no token before it is known"
            if row.num_computed == row.num_known:
                caught_up.append(request_id)
            else:
                del token_ids[request_id]
        for request_id in caught_up:
            self._births[request_id] = self._ticks - self._prefills.pop(request_id).num_known
            self._births_sum += self._births[request_id]
        return context, pairs

    def _recorded_tokens(
        self, token_ids: dict[str, list[int]], tokens: TokenRecording, drafts: dict[str, list[int]]
    ) -> dict[str, list[int]]:
        """Returns the tokens of the recording for the rows that sampled one, and adds accepted draft tokens to them."""
        starts = {rid: self._length(rid) - self._num_prompt_tokens[rid] for rid in token_ids}
        recorded = {rid: [tokens(rid, start)] for rid, start in starts.items()}
        for request_id, draft in drafts.items():
            sampled = recorded[request_id]
            for token in draft:
                if token != sampled[-1]:
                    break
                sampled.append(tokens(request_id, starts[request_id] + len(sampled)))
            self._births[request_id] -= len(sampled) - 1
            self._births_sum -= len(sampled) - 1
        return recorded
