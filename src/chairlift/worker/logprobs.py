"""LogprobTensors: the log-probabilities of given tokens and of the most likely tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from chairlift.outputs import Logprob, TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """The logprobs at N positions: column 0 has the given token, the others the K most likely tokens in order.

    Attributes:
        token_ids: int64 [N, 1 + K].
        logprobs: float32 [N, 1 + K].
        ranks: int64 [N, 1 + K]; 1 + the number of more likely tokens, so equally likely tokens share a rank.
        num_top: the number of most likely tokens to return at each position, at most K.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    num_top: Sequence[int]

    def to_host(self) -> LogprobTensors:
        """Start a copy to the host without waiting; it is complete when the device has finished its queued work."""
        names = ("token_ids", "logprobs", "ranks")
        return replace(self, **{name: getattr(self, name).to("cpu", non_blocking=True) for name in names})

    def records(self) -> list[TokenLogprobs]:
        """One record for each position; waits for the device."""
        columns = zip(self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        entries = [list(map(Logprob, *column)) for column in columns]
        return [TokenLogprobs(entry[0], entry[1 : 1 + k]) for entry, k in zip(entries, self.num_top, strict=True)]
