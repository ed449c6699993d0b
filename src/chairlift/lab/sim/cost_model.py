"""The interface of cost models, which compute the duration of a step from its shape."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from chairlift.events import Step


class StepShape(NamedTuple):
    """The input of a cost model: the amounts of work in one step.

    Attributes:
        num_tokens: computed tokens, padding included.
        num_seqs: requests in the batch (rows).
        num_sampled: rows that are computed by the LM head: those that sample a token, and padding rows with context.
        num_context: tokens whose K and V are read: the sum over the rows of their length after the step.
        num_pairs: (query, key) pairs of causal attention, summed over the rows. Padding in a row without other tokens
            attends to the row's context; left padding attends to nothing.
    """

    num_tokens: int
    num_seqs: int
    num_sampled: int
    num_context: int
    num_pairs: int


class CostModel(Protocol):
    """A model of the duration of a step."""

    def seconds(self, shape: StepShape) -> float:
        """Returns the duration of a step of this shape in seconds."""
        ...


def num_causal_pairs(start: int, count: int) -> int:
    """Returns the (query, key) pairs of `count` queries after `start` computed tokens, under causal attention."""
    return count * start + count * (count + 1) // 2


def num_padding_pairs(length: int, count: int) -> int:
    """Returns the (query, key) pairs of `count` padding queries in a row that has `length` tokens and computes none.

    The last query attends to all tokens, and each earlier one to one token less.
    """
    return num_causal_pairs(max(0, length - count), min(length, count))


def recorded_shape(step: Step) -> StepShape:
    """Returns the shape of a recorded step."""
    padding = step.num_padding or [0] * len(step.request_ids)
    rows = list(zip(step.num_computed, step.num_scheduled, padding, strict=True))
    return StepShape(
        num_tokens=sum(step.num_scheduled) + sum(padding),
        num_seqs=len(rows),
        num_sampled=sum(map(bool, step.num_new))
        + sum(step.num_draft)
        + sum(start > 0 and not count for start, count, _ in rows),
        num_context=sum(start + count for start, count, _ in rows),
        num_pairs=sum(
            num_causal_pairs(start, count) if count else num_padding_pairs(start, padded)
            for start, count, padded in rows
        ),
    )
