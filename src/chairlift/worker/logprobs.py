"""Log-probabilities of given tokens and of the likeliest ones, from raw logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chairlift.outputs import Logprob, TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """For N positions, the token that stands there in column 0, then the K likeliest in order.

    Attributes:
        token_ids: int64 [N, 1 + K].
        logprobs: float32 [N, 1 + K].
        ranks: int64 [N, 1 + K]; 1 + the number of likelier tokens, so equals share a rank.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor

    def to_host(self) -> LogprobTensors:
        """A copy that is complete once the device has caught up; the host does not wait for it."""
        return LogprobTensors(*(t.to("cpu", non_blocking=True) for t in (self.token_ids, self.logprobs, self.ranks)))

    def records(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """One record a position; position i shows its `num_top[i]` <= K likeliest tokens."""
        columns = zip(self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        entries = [list(map(Logprob, *column)) for column in columns]
        return [TokenLogprobs(entry[0], entry[1 : 1 + k]) for entry, k in zip(entries, num_top, strict=True)]

    @staticmethod
    def concatenate(parts: Sequence[LogprobTensors]) -> LogprobTensors:
        return LogprobTensors(
            torch.cat([part.token_ids for part in parts]),
            torch.cat([part.logprobs for part in parts]),
            torch.cat([part.ranks for part in parts]),
        )


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.sampling.SamplingKernels.logprobs`."""
    chosen = logits.gather(1, token_ids[:, None])
    chosen_ranks = 1 + (logits > chosen).sum(dim=1, keepdim=True)
    top = logits.topk(min(num_top, logits.shape[1]), dim=1)
    top_ranks = 1 + (top.values[:, None, :] > top.values[:, :, None]).sum(dim=2)
    return (
        torch.cat((token_ids[:, None], top.indices), dim=1),
        torch.cat((chosen, top.values), dim=1) - logits.logsumexp(dim=1, keepdim=True),
        torch.cat((chosen_ranks, top_ranks), dim=1),
    )
