"""The verification of draft tokens: a token is sampled after each one that equals the token sampled before it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from chairlift.kernels.device_copy import to_device
from chairlift.worker.request_rows import IntArray, RequestRows
from chairlift.worker.sampler import SampledTokens, Sampler


class DraftRounds:
    """The order of the logits of a step: those after the last known token of each request, then those after its first
    draft token, and so on.

    Args:
        num_drafts: int64 [N], the number of draft tokens of each request.

    Attributes:
        num_rounds: 1 + the largest number of draft tokens.
        index, position: int64 [N + sum of num_drafts]: for each row of logits the request, and the number of draft
            tokens before it.
        rows: int64 [num_rounds, N], the row of the logits after draft token `round` - 1 of a request.
    """

    def __init__(self, num_drafts: IntArray) -> None:
        self.num_rounds = 1 + int(num_drafts.max(initial=0))
        has_row = np.arange(self.num_rounds)[:, None] <= num_drafts
        self.position, self.index = np.nonzero(has_row)
        self.rows: IntArray = np.cumsum(has_row).reshape(has_row.shape) - 1


def sample_rounds(
    sampler: Sampler,
    rows: RequestRows,
    chosen: IntArray,
    logits: torch.Tensor,
    rounds: DraftRounds,
    drafts: list[list[int]],
) -> list[SampledTokens]:
    """Sample after the last known token of each row, and go on after each draft token that equals the token sampled
    before it. The tokens are appended to the rows.

    Args:
        chosen: int64 [N], the rows.
        logits: float32 [at least N + the number of draft tokens, V], in the order of `rounds`; overwritten.
        drafts: the draft tokens of each row.
    """
    sampled = [sampler.sample(logits[: len(chosen)], chosen)]
    rows.append_sampled(chosen, sampled[0].token_ids)
    index = list(range(len(chosen)))
    for position in range(1, rounds.num_rounds):
        tokens = sampled[-1]
        values = zip(index, tokens.token_ids.tolist(), strict=True)
        index = [
            i
            for at, (i, token) in enumerate(values)
            if drafts[i][position - 1 : position] == [token] and at not in tokens.errors
        ]
        if not index:
            break
        tokens = sampler.sample(logits[to_device(rounds.rows[position, index], rows.device)], chosen[index])
        # A row with an error stays as it is: the next step samples its token again and reports the error.
        valid = [at for at in range(len(index)) if at not in tokens.errors]
        if not valid:
            break
        going_on = chosen[index][valid]
        rows.advance(going_on, np.ones_like(going_on))
        rows.append_sampled(going_on, tokens.token_ids[valid])
        sampled.append(replace(tokens, positions=index))
    return sampled
