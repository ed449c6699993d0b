"""LogprobTensors: the log-probabilities of given tokens and of the most likely tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from chairlift.outputs import Logprob, TokenLogprobs


class LogprobTensors(NamedTuple):
    """The logprobs at N positions: column 0 has the given token, the others the K most likely tokens in order.

    Attributes:
        token_ids: int64 [N, 1 + K].
        logprobs: float32 [N, 1 + K].
        ranks: int64 [N, 1 + K]; 1 + the number of more likely tokens, so equally likely tokens share a rank.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor

    def to_host(self) -> LogprobTensors:
        """Start a copy to the host without waiting; it is complete when the device has finished its queued work."""
        return LogprobTensors(*(t.to("cpu", non_blocking=True) for t in self))

    def records(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """One record for each position; the record of position i has its `num_top[i]` <= K most likely tokens."""
        columns = zip(self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        entries = [list(map(Logprob, *column)) for column in columns]
        return [TokenLogprobs(entry[0], entry[1 : 1 + k]) for entry, k in zip(entries, num_top, strict=True)]

    @staticmethod
    def concatenate(parts: Sequence[LogprobTensors]) -> LogprobTensors:
        return LogprobTensors(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
