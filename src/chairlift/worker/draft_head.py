"""DraftHead: proposes the next tokens of requests with the predictor of their model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from chairlift.kernels.sampling import TokenSampler
from chairlift.models.decoder import DecoderModel
from chairlift.worker.draft_model import propose_tokens
from chairlift.worker.input_batch import InputBatch, gather_input_batch
from chairlift.worker.request_rows import IntArray, RequestRows
from chairlift.worker.transfer import to_device


class DraftHead:
    """Proposes tokens with the predictor of the model (multi-token prediction).

        position             p           p + 1       p + 2
        model      reads     token p     token p+1                   -> token p+2 is sampled
        predictor  reads     h(p) and    h(p+1) and  r(p+1) and      r: result of the predictor
                             token p+1   token p+2   draft token p+3
                                         -> p+3      -> p+4

    Its K and V are in the blocks of the model. They are computed after each step for all tokens of it, because the
    hidden states h are not kept, so every request can have a proposal as soon as it has computed a step. Those of draft
    tokens are overwritten when the tokens have been verified. In a block that a prefix shares, the last position
    depends on the token after the block, which may be that of another request: this changes proposals only.

    A token is drawn with the parameters and the random number that the model will use at this position.

    Args:
        choose: the sampler of the model.
    """

    def __init__(self, model: DecoderModel, choose: TokenSampler, rows: RequestRows) -> None:
        self._model = model
        self._choose = choose
        self._rows = rows
        self._last: torch.Tensor | None = None

    def read(self, batch: InputBatch, hidden: torch.Tensor, plan: Any, first: IntArray, num_accepted: IntArray) -> None:
        """Compute K and V of the tokens of a step, after its tokens were sampled.

        Args:
            hidden: the result of the model's `forward`.
            plan: the plan of the step.
            first: int64 [B], the position of the first token of each request.
            num_accepted: int64 [B], the number of accepted draft tokens of each request.
        """
        counts = np.diff(batch.token_end, prepend=0)
        offsets = np.arange(len(hidden)) - np.repeat(batch.token_start, counts)
        positions = np.maximum(np.repeat(first, counts) + offsets, 0)
        after = self._model.final_hidden(hidden)
        token_ids = self._rows.tokens_at(np.repeat(batch.rows, counts), positions + 1)
        result = self._model.predict(token_ids, batch.positions, after, plan)
        last = batch.token_end - batch.num_drafts + num_accepted - 1
        self._keep(batch.rows, result[to_device(last, self._rows.device)])

    def propose(self, num_drafts: Mapping[str, int]) -> dict[str, list[int]]:
        """Propose tokens; request id -> number of tokens, at least 1. Each request has computed a step."""
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
