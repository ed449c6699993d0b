"""StepExtension: a part of a step that only some engines have, such as adapters, drafts or copies of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from chairlift.outputs import NewRequest, SchedulerOutput
from chairlift.worker.input_batch import InputBatch
from chairlift.worker.pending_step import PendingStep
from chairlift.worker.request_rows import IntArray


@dataclass(slots=True)
class ComputedStep:
    """A step that the model has computed.

    Attributes:
        drafts: the draft tokens of each request that has some.
        plan: what the model has planned for the batch.
        first_positions: int64 [B], the position of the first token of each request.
        hidden: [T, hidden_size], the hidden states of all tokens.
        num_accepted: int64 [B], the number of accepted draft tokens of each request, after sampling.
        results: what the step returns.
    """

    batch: InputBatch
    drafts: Mapping[str, list[int]]
    plan: Any
    first_positions: IntArray
    hidden: torch.Tensor
    num_accepted: IntArray
    results: PendingStep


class StepExtension(Protocol):
    """The runner calls these methods of each extension in this order; the defaults do nothing."""

    def add(self, row: int, new: NewRequest) -> None:
        """Add a request, which has got a row."""
        return

    def begin(self, output: SchedulerOutput) -> None:
        """Begin a step, whose requests have their rows. It may have no tokens."""
        return

    def prepare(self, batch: InputBatch) -> None:
        """Prepare the model for a batch."""
        return

    def read_hidden(self, step: ComputedStep) -> None:
        """Read the hidden states. The tokens of the step do not count as computed yet."""
        return

    def finish(self, step: ComputedStep) -> None:
        """Finish a step, whose tokens have been sampled."""
        return


class DraftProposer(StepExtension, Protocol):
    """An extension that proposes draft tokens."""

    def propose(self, num_drafts: Mapping[str, int]) -> dict[str, list[int]]:
        """Propose tokens; request id -> number of tokens, at least 1."""
        ...
