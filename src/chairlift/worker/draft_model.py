"""DraftModel: a small model that proposes the next tokens of requests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from chairlift.kernels.sampling import TokenSampler
from chairlift.worker.input_batch import gather_input_batch
from chairlift.worker.request_rows import IntArray, RequestRows
from chairlift.worker.runner_model import RunnerModel
from chairlift.worker.transfer import to_device


class DraftModel:
    """Proposes tokens for the requests of another model, which has the same vocabulary.

    Its K and V have the block tables and slots of the other model, in memory of their own. They are computed only for
    requests that need a proposal: first in chunks, until they reach the end of the request, then token by token. Those
    of rejected tokens are overwritten.

    A token is drawn with the parameters and the random number that the other model will use at this position, so equal
    distributions yield equal tokens.

    Args:
        model: a model with allocated KV memory.
        plan: prepares the attention of one step, as for `ModelRunner`.
        choose: the sampler of the other model.
        rows: the requests.
    """

    def __init__(self, model: RunnerModel, plan: Callable[..., Any], choose: TokenSampler, rows: RequestRows) -> None:
        self._model = model
        self._plan = plan
        self._choose = choose
        self._rows = rows
        self._num_computed: IntArray = np.zeros(rows.max_num_seqs, dtype=np.int64)

    def add(self, row: int) -> None:
        """Add a request, of which this model has computed nothing, even if it shares blocks."""
        self._num_computed[row] = 0

    def read(self, num_tokens: Mapping[str, int]) -> None:
        """Compute K and V of the next tokens of requests; request id -> number of tokens, less than all known ones."""
        self._forward(self._view(), num_tokens)

    def propose(self, num_drafts: Mapping[str, int]) -> dict[str, list[int]]:
        """Propose tokens; request id -> number of tokens, at least 1."""
        request_ids = list(num_drafts)
        view = self._view()
        batch_rows = self._rows.rows_of(request_ids).copy()
        num_known = self._rows.num_tokens[batch_rows]
        drafts: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
        for position in range(max(num_drafts.values())):
            chosen = [request_id for request_id, count in num_drafts.items() if count > position]
            rows = view.rows_of(chosen)
            uncomputed = view.num_tokens[rows] - view.num_computed_tokens[rows]
            hidden = self._forward(view, dict(zip(chosen, uncomputed.tolist(), strict=True)))
            last = np.cumsum(uncomputed) - 1
            token_ids = self._choose(self._model.logits(hidden[to_device(last, view.device)]), rows)
            view.append_sampled(rows, token_ids)
            for request_id, token in zip(chosen, token_ids.tolist(), strict=True):
                drafts[request_id].append(token)
        self._rows.num_tokens[batch_rows] = num_known
        return drafts

    def discard_rejected(self, request_ids: Iterable[str]) -> None:
        """Count K and V of rejected tokens as not computed, after the other model has verified a proposal."""
        rows = self._rows.rows_of(list(request_ids))
        self._num_computed[rows] = np.minimum(self._num_computed[rows], self._rows.num_computed_tokens[rows])

    def _view(self) -> RequestRows:
        """The rows with the progress of this model."""
        view = copy.copy(self._rows)
        view.num_computed_tokens = self._num_computed
        return view

    def _forward(self, view: RequestRows, num_tokens: Mapping[str, int]) -> torch.Tensor:
        batch = gather_input_batch(view, num_tokens)
        hidden = self._model.forward(batch.token_ids, batch.positions, self._plan(*batch.attention))
        view.advance(batch.rows, batch.num_scheduled)
        return hidden
