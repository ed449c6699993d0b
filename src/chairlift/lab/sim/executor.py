"""An executor for simulation, which advances a virtual clock by the duration of each step and computes no model."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chairlift.clock import VirtualClock
from chairlift.lab.sim.cost_model import CostModel, StepShape, num_causal_pairs, num_padding_pairs
from chairlift.outputs import Logprob, ModelRunnerOutput, SchedulerOutput, TokenLogprobs

TOP_TOKEN: Final = (1.5, 0.7)
"""The parameters of the beta distribution of the probability of the most likely token: a free choice, with a mean of
0.68. The savings of beam search depend on it (preset vllm-fig15)."""

ZERO_TOKEN = [0]
"""The sampled tokens of a request that allows any."""


@dataclass(slots=True)
class _Row:
    """A request in the batch, with its numbers of computed and known tokens, the number of its beams, and its tokens in
    each step."""

    num_computed: int
    num_known: int
    num_beams: int
    sampled: list[int]


class SimExecutor:
    """Implements `Executor` without a model: a step takes the seconds of a cost model on a virtual clock.

    Every sampled token is 0, or the first allowed one. This adds no hits of the prefix cache between requests with
    different prompts, because the hash of a block includes all tokens before it. Requests with equal prompts have equal
    outputs, as under greedy sampling, and share their blocks. Swapped blocks are copied before the step.

    The next tokens of a beam have random probabilities: the most likely token has p, which is drawn from a beta
    distribution with the parameters `top_token`, and each further one has half of what is left.
    """

    def __init__(
        self,
        cost_model: CostModel,
        clock: VirtualClock,
        block_copy_seconds: float = 0.0,
        top_token: tuple[float, float] = TOP_TOKEN,
    ) -> None:
        self._block_copy_seconds = block_copy_seconds
        self._top_token = top_token
        self._cost_model = cost_model
        self._clock = clock
        self._rows: dict[str, _Row] = {}
        self._ready_time = 0.0
        self._random = random.Random(0)
        self.num_steps = 0

    def submit(self, output: SchedulerOutput) -> tuple[ModelRunnerOutput, float]:
        """Starts a step after those in progress; the handle has its output and its end on the virtual clock."""
        for request_id in output.removed:
            del self._rows[request_id]
        for new in output.new_requests:
            num_beams = new.sampling_params.n if new.sampling_params.use_beam_search else 0
            sampled = list(new.sampling_params.allowed_token_ids or ZERO_TOKEN)[:1]
            self._rows[new.request_id] = _Row(new.num_computed_tokens, len(new.token_ids), num_beams, sampled)
        shape, token_ids = self._advance(output)
        logprobs = {
            rid: [self._likely_tokens(self._rows[rid].num_beams)] for rid in token_ids if self._rows[rid].num_beams
        }
        self._ready_time = max(self._ready_time, self._clock.now()) + self._cost_model.seconds(shape)
        self._ready_time += (len(output.swapped_out) + len(output.swapped_in)) * self._block_copy_seconds
        self.num_steps += 1
        return ModelRunnerOutput(output.step, token_ids, logprobs), self._ready_time

    def result(self, handle: tuple[ModelRunnerOutput, float]) -> ModelRunnerOutput:
        """Advances the clock to the end of the step, and returns its output."""
        output, ready_time = handle
        self._clock.advance(max(0.0, ready_time - self._clock.now()))
        return output

    def _advance(self, output: SchedulerOutput) -> tuple[StepShape, dict[str, list[int]]]:
        """Adds the scheduled tokens to the rows; returns the shape of the step and the sampled tokens."""
        scheduled, padding, drafts = output.num_scheduled_tokens, output.num_padding_tokens, output.draft_token_ids
        token_ids: dict[str, list[int]] = {}
        num_sampled = num_context = num_pairs = 0
        for request_id, count in scheduled.items():
            row = self._rows[request_id]
            start = row.num_computed
            num_context += start + count
            if not count:  # only padding
                num_sampled += start > 0
                num_pairs += num_padding_pairs(start, padding[request_id])
                continue
            num_pairs += start + 1 if count == 1 else num_causal_pairs(start, count)
            draft = drafts.get(request_id, ()) if drafts else ()
            row.num_computed = start + count - len(draft)
            if row.num_computed == row.num_known:
                num_sampled += 1 + len(draft)
                token_ids[request_id] = sampled = self._sample(request_id, row.num_known, draft)
                row.num_known += len(sampled)
                row.num_computed += len(sampled) - 1
        return StepShape(
            num_tokens=sum(scheduled.values()) + sum(padding.values()),
            num_seqs=len(scheduled),
            num_sampled=num_sampled,
            num_context=num_context,
            num_pairs=num_pairs,
        ), token_ids

    def _likely_tokens(self, count: int) -> TokenLogprobs:
        top, left = [], 1.0
        probability = min(max(self._random.betavariate(*self._top_token), 1e-6), 1 - 1e-6)
        for token in range(count):
            top.append(Logprob(token, math.log(probability), token + 1))
            left -= probability
            probability = left / 2
        return TokenLogprobs(top[0], top)

    def _sample(self, request_id: str, num_known: int, drafts: Sequence[int]) -> list[int]:
        """Returns the tokens after the known tokens: one, and one after each accepted draft token."""
        assert not drafts, "the simulator has no speculative decoding"
        return self._rows[request_id].sampled
