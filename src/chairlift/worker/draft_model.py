"""What proposes the next tokens of requests: a small model, DraftModel, or the predictor of their model, DraftHead."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import numpy as np
import torch

from chairlift.kernels.device_copy import to_device
from chairlift.kernels.sampling import TokenSampler
from chairlift.models.decoder import DecoderModel
from chairlift.outputs import NewRequest, SchedulerOutput
from chairlift.worker.input_batch import gather_input_batch
from chairlift.worker.request_rows import NO_STATE, IntArray, RequestRows
from chairlift.worker.runner_model import RunnerModel
from chairlift.worker.step_extension import ComputedStep, DraftProposer


class DraftModel(DraftProposer):
    """Proposes tokens for the requests of another model, which has the same vocabulary.

    Its K and V have the block tables and slots of the other model, in separate memory. They are computed only for
    requests that need a proposal: first in chunks, until they reach the end of the request, then token by token. Those
    of rejected tokens are overwritten. Recurrent states have the slots of `RequestRows` in separate memory, too:
    the one before each proposed token is kept until the other model has verified it.

    A token is drawn with the parameters and the random number that the other model will use at this position, so equal
    distributions yield equal tokens.

    Args:
        model: a model with allocated KV memory.
        choose: the sampler of the other model.
        rows: the requests.
        has_states: whether layers have recurrent state.
    """

    def __init__(self, model: RunnerModel, choose: TokenSampler, rows: RequestRows, has_states: bool = False) -> None:
        self._model = model
        self._choose = choose
        self._rows = rows
        self._has_states = has_states
        self._num_computed: IntArray = np.zeros(rows.max_num_seqs, dtype=np.int64)
        self._state_sources = rows.state_sources.copy()
        self._state_slots = rows.state_slots.copy()
        self._draft_slots = rows.draft_slots.copy()

    def add(self, row: int, new: NewRequest) -> None:
        """Add a request, of which this model has computed nothing, even if it shares blocks."""
        self._num_computed[row] = 0
        self._state_sources[row] = NO_STATE

    def begin(self, output: SchedulerOutput) -> None:
        if output.num_draft_reads:
            self.read(output.num_draft_reads)

    def finish(self, step: ComputedStep) -> None:
        if step.drafts:
            self.discard_rejected(step.drafts)

    def read(self, num_tokens: Mapping[str, int]) -> None:
        """Compute K and V of the next tokens of requests; request id -> number of tokens, less than all known ones."""
        self._forward(self._view(), num_tokens)

    def propose(self, num_drafts: Mapping[str, int]) -> dict[str, list[int]]:
        view = self._view()
        counts: IntArray = np.array(list(num_drafts.values()), dtype=np.int64)
        first_slots = np.cumsum(counts - 1) - (counts - 1)

        def next_logits(position: int, chosen: list[str], rows: IntArray) -> torch.Tensor:
            if self._has_states and position:
                view.swap_states(rows, first_slots[counts > position] + position - 1)
            uncomputed = view.num_tokens[rows] - view.num_computed_tokens[rows]
            hidden = self._forward(view, dict(zip(chosen, uncomputed.tolist(), strict=True)))
            return self._model.logits(hidden[to_device(np.cumsum(uncomputed) - 1, view.device)])

        return propose_tokens(view, num_drafts, self._choose, next_logits)

    def discard_rejected(self, drafts: Mapping[str, list[int]]) -> None:
        """Count K and V of rejected tokens as not computed, after the other model has verified the last proposal, and
        continue the states before them."""
        rows = self._rows.rows_of(list(drafts))
        num_rejected = np.maximum(self._num_computed[rows] - self._rows.num_computed_tokens[rows], 0)
        self._num_computed[rows] -= num_rejected
        if self._has_states:
            num_read = np.array([len(tokens) - 1 for tokens in drafts.values()])  # the last token is not computed
            self._view().keep_states(rows, num_read, num_read - num_rejected)

    def _view(self) -> RequestRows:
        """The rows with the progress and the states of this model."""
        view = copy.copy(self._rows)
        view.num_computed_tokens = self._num_computed
        view.state_sources, view.state_slots = self._state_sources, self._state_slots
        view.draft_slots = self._draft_slots
        return view

    def _forward(self, view: RequestRows, num_tokens: Mapping[str, int]) -> torch.Tensor:
        batch = gather_input_batch(view, num_tokens, checkpoints={} if self._has_states else None)
        plan = self._model.plan(*batch.attention, states=batch.states)
        hidden = self._model.forward(batch.token_ids, batch.positions, plan)
        view.advance(batch.rows, batch.num_scheduled)
        return hidden


class DraftHead(DraftProposer):
    """Proposes tokens with the predictor of the model (multi-token prediction).

        position             p           p + 1       p + 2
        model      reads     token p     token p+1                   -> token p+2 is sampled
        predictor  reads     h(p) and    h(p+1) and  r(p+1) and      r: result of the predictor
                             token p+1   token p+2   draft token p+3
                                         -> p+3      -> p+4

    Its K and V are in the blocks of the model. They are computed after each step for all tokens of it, because the
    hidden states h are not kept, so every request can have a proposal as soon as it has computed a step. Those of draft
    tokens are overwritten when the tokens have been verified. In a block that a prefix shares, the last position
    depends on the token after the block, which may belong to another request: this changes proposals only.

    A token is drawn with the parameters and the random number that the model will use at this position.

    Args:
        choose: the sampler of the model.
    """

    def __init__(self, model: DecoderModel, choose: TokenSampler, rows: RequestRows) -> None:
        self._model = model
        self._choose = choose
        self._rows = rows
        self._last: torch.Tensor | None = None

    def finish(self, step: ComputedStep) -> None:
        """Compute K and V of the tokens of the step."""
        batch = step.batch
        counts = np.diff(batch.token_end, prepend=0)
        offsets = np.arange(len(step.hidden)) - np.repeat(batch.token_start, counts)
        positions = np.maximum(np.repeat(step.first_positions, counts) + offsets, 0)
        after = self._model.final_hidden(step.hidden)
        token_ids = self._rows.tokens_at(np.repeat(batch.rows, counts), positions + 1)
        result = self._model.predict(token_ids, batch.positions, after, step.plan)
        last = batch.token_end - batch.num_drafts + step.num_accepted - 1
        self._keep(batch.rows, result[to_device(last, self._rows.device)])

    def propose(self, num_drafts: Mapping[str, int]) -> dict[str, list[int]]:
        """As every proposer, for requests that have computed a step."""
        view = copy.copy(self._rows)
        view.num_computed_tokens = self._rows.num_computed_tokens.copy()

        def next_logits(position: int, chosen: list[str], rows: IntArray) -> torch.Tensor:
            if position:
                self._extend(view, chosen, rows)
            return self._model.predicted_logits(self._results(rows))

        return propose_tokens(self._rows, num_drafts, self._choose, next_logits)

    def _extend(self, view: RequestRows, request_ids: list[str], rows: IntArray) -> None:
        """Compute the next position of requests from the last proposed token."""
        batch = gather_input_batch(view, dict.fromkeys(request_ids, 1))
        token_ids = self._rows.tokens_at(rows, view.num_computed_tokens[rows] + 1)
        plan = self._model.plan(*batch.attention)
        result = self._model.predict(token_ids, batch.positions, self._results(rows), plan)
        self._keep(rows, result)
        view.num_computed_tokens[rows] += 1

    def _results(self, rows: IntArray) -> torch.Tensor:
        """A copy of the last results of these rows."""
        assert self._last is not None, "a request has computed a step before it has a proposal"
        return self._last[to_device(rows, self._rows.device)]

    def _keep(self, rows: IntArray, results: torch.Tensor) -> None:
        if self._last is None:
            self._last = results.new_zeros((self._rows.max_num_seqs, results.shape[1]))
        self._last[to_device(rows, self._rows.device)] = results


def propose_tokens(
    rows: RequestRows,
    num_drafts: Mapping[str, int],
    choose: TokenSampler,
    next_logits: Callable[[int, list[str], IntArray], torch.Tensor],
) -> dict[str, list[int]]:
    """Propose tokens one position after the other, which are in the rows meanwhile.

    Args:
        num_drafts: request id -> number of tokens, at least 1.
        next_logits: (position, requests with a token there, their rows) -> the logits of these tokens [N, V].
    """
    all_rows = rows.rows_of(list(num_drafts)).copy()
    num_known = rows.num_tokens[all_rows]
    drafts: dict[str, list[int]] = {request_id: [] for request_id in num_drafts}
    for position in range(max(num_drafts.values())):
        chosen = [request_id for request_id, count in num_drafts.items() if count > position]
        batch_rows = rows.rows_of(chosen)
        token_ids = choose(next_logits(position, chosen, batch_rows), batch_rows)
        rows.append_sampled(batch_rows, token_ids)
        for request_id, token in zip(chosen, token_ids.tolist(), strict=True):
            drafts[request_id].append(token)
    rows.num_tokens[all_rows] = num_known
    return drafts
