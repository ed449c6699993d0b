"""DraftSelection: adds draft tokens to a planned step, as many as are expected to raise the rate of output tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from chairlift.config import SchedulerConfig
from chairlift.core.speculation.acceptance import AcceptanceEstimates
from chairlift.core.speculation.draft_counts import MIN_SPEEDUP, DraftCost, choose_counts
from chairlift.core.speculation.prompt_lookup import PromptLookup, Proposal
from chairlift.outputs import SchedulerOutput
from chairlift.request import Request
from chairlift.speculative_config import SpeculativeConfig

MAX_LAG: Final = 8
"""A draft model that lacks K and V of more tokens of a request computes them before it proposes tokens."""

MAX_READ: Final = 128
"""The maximum number of such tokens that a draft model computes in a step."""


class _Candidate(NamedTuple):
    """A request that may have draft tokens.

    Attributes:
        limit: the maximum number of draft tokens.
        token_ids: the proposed tokens; None if a model of the executor proposes them.
        probability: the estimated probability that a draft token is accepted if the ones before it are.
    """

    request: Request
    limit: int
    token_ids: list[int] | None
    probability: float


class DraftSelection:
    """Chooses the draft tokens that a step verifies (see `choose_counts`).

    A draft token needs no further memory: it is written to a slot that its request already holds. It never delays or
    preempts another request, because it uses what the planned step leaves of the token budget.

    The probability of acceptance is estimated from recent proposals. Those of a prompt lookup are made even if they are
    not verified: the sampled token is compared to the first draft token in any case.

    Args:
        config: the configuration of a scheduler that has a `speculative_config`.
    """

    def __init__(self, config: SchedulerConfig, speculative_config: SpeculativeConfig) -> None:
        self._config = speculative_config
        self._has_model = speculative_config.method != "ngram"
        self._max_tokens = config.max_num_batched_tokens
        self._max_logit_rows = config.max_logit_rows
        self._cost = DraftCost(config.row_time, config.draft_row_time)
        self._lookups: dict[str, PromptLookup] = {}
        self._proposals: dict[str, Proposal] = {}
        self._num_read: dict[str, int] = {}
        self._added: set[str] = set()
        self._estimates = AcceptanceEstimates()

    def extend(self, output: SchedulerOutput, sampling: Sequence[Request]) -> None:
        """Add draft tokens to a planned step, for requests that sample a token in it."""
        self._proposals.clear()
        self._added = {new.request_id for new in output.new_requests}
        for new in output.new_requests:
            self._num_read[new.request_id] = 0
        num_rows = sum(output.num_scheduled_tokens.values()) + sum(output.num_padding_tokens.values())
        num_sampled = len(sampling)
        room = min(self._max_tokens - num_rows, self._max_logit_rows - len(output.num_scheduled_tokens))
        if room <= 0 or not num_sampled or self._cost.best_speedup(num_rows, num_sampled, room) < MIN_SPEEDUP:
            return
        candidates = [c for c in (self._candidate(request, output) for request in sampling) if c is not None]
        counts = choose_counts(
            [candidate.probability for candidate in candidates],
            [candidate.limit for candidate in candidates],
            num_rows,
            num_sampled,
            room,
            self._cost,
        )
        for candidate, count in zip(candidates, counts, strict=True):
            if count:
                request_id = candidate.request.request_id
                output.num_scheduled_tokens[request_id] += count
                if candidate.token_ids is None:
                    output.num_draft_tokens[request_id] = count
                else:
                    output.draft_token_ids[request_id] = candidate.token_ids[:count]
        if self._has_model:
            unused = [c.request.request_id for c, count in zip(candidates, counts, strict=True) if not count]
            self._estimates.fade(unused)

    def record(self, request: Request, new_token_ids: Sequence[int], num_drafts: int) -> None:
        """Learn from the tokens that were sampled for a request.

        Args:
            num_drafts: the number of draft tokens that the step has verified.
        """
        request_id, num_new = request.request_id, len(new_token_ids)
        if self._has_model:
            if num_drafts:
                self._num_read[request_id] = len(request.token_ids) - num_new - 1 + min(num_drafts, num_new)
                self._estimates.record(request_id, 1, num_new - 1, min(num_new, num_drafts))
            return
        proposal = self._proposals.pop(request_id, None)
        if proposal is None:
            return
        num_compared = min(max(num_drafts, 1), len(proposal.token_ids), num_new)
        num_equal = 0
        while num_equal < num_compared and proposal.token_ids[num_equal] == new_token_ids[num_equal]:
            num_equal += 1
        self._estimates.record(request_id, proposal.match_length, num_equal, min(num_equal + 1, max(num_drafts, 1)))

    def forget(self, request_id: str) -> None:
        """Drop all that is kept for a request that has finished."""
        self._lookups.pop(request_id, None)
        self._proposals.pop(request_id, None)
        self._num_read.pop(request_id, None)
        self._estimates.forget(request_id)

    def _candidate(self, request: Request, output: SchedulerOutput) -> _Candidate | None:
        """A request that computes exactly its last known token, if tokens can be proposed for it."""
        num_tokens = len(request.token_ids)
        limit = min(
            self._config.max_draft_tokens,
            request.num_slots - num_tokens,
            request.end_total_tokens - num_tokens - 1,
        )
        if limit <= 0 or output.num_scheduled_tokens[request.request_id] != 1:
            return None
        if self._has_model:
            if self._read(request, output):
                return None
            return _Candidate(request, limit, None, self._estimates.probability(request.request_id, 1))
        if (proposal := self._propose(request, limit)) is None:
            return None
        # No token is sampled after a stop token.
        tokens = list(takewhile(lambda token: token not in request.stop_token_ids, proposal.token_ids))
        if not tokens:
            return None
        self._proposals[request.request_id] = Proposal(tokens, proposal.match_length)
        probability = self._estimates.probability(request.request_id, proposal.match_length)
        return _Candidate(request, len(tokens), tokens, probability)

    def _propose(self, request: Request, max_tokens: int) -> Proposal | None:
        if (lookup := self._lookups.get(request.request_id)) is None:
            lookup = PromptLookup(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
            self._lookups[request.request_id] = lookup
        return lookup.propose(request.token_ids, max_tokens)

    def _read(self, request: Request, output: SchedulerOutput) -> bool:
        """Let the draft model read the next tokens of a request if it lags behind, one request at a time.

        The predictor of a model reads the tokens of every step, so it lacks only the tokens of the first one.
        """
        request_id = request.request_id
        if self._config.method == "mtp":
            return request_id in self._added
        num_read = self._num_read[request_id]
        lag = len(request.token_ids) - num_read
        if lag <= MAX_LAG:
            return False
        if not output.num_draft_reads:
            count = min(lag - 1, MAX_READ)
            output.num_draft_reads[request_id] = count
            self._num_read[request_id] = num_read + count
        return True
