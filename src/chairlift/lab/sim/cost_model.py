"""What a step costs: the one question that a simulator asks of a device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from chairlift.events import Step


class StepShape(NamedTuple):
    """All that a cost model may look at. Everything here can be kept up to date in O(1) for a batch of decodes.

    Attributes:
        num_tokens: tokens computed, padding included.
        num_seqs: rows: requests in the batch.
        num_sampled: rows that go through the LM head: those that get a token, and those of padding that hold something.
        num_context: tokens whose K and V are read: the sum over the rows of their length after the step.
        num_pairs: (query, key) pairs: the sum over the rows of what its queries see, causally. The padding of a row
            that has nothing else sees what the row holds; left padding sees nothing.
    """

    num_tokens: int
    num_seqs: int
    num_sampled: int
    num_context: int
    num_pairs: int


class CostModel(Protocol):
    """Seconds of a step by its shape."""

    def seconds(self, shape: StepShape) -> float: ...

    def constants(self) -> list[tuple[str, str]]:
        """Its constants, as (name, value with unit), to be printed with whatever was computed from it."""
        ...


def num_causal_pairs(start: int, count: int) -> int:
    """Pairs of `count` queries after `start` computed tokens, where each sees itself and everything before it."""
    return count * start + count * (count + 1) // 2


def num_padding_pairs(length: int, count: int) -> int:
    """Pairs of `count` queries of padding in a row that holds `length` tokens and computes none: the last query sees
    all of them."""
    return num_causal_pairs(max(0, length - count), min(length, count))


def shape_of(step: Step) -> StepShape:
    """The shape of a recorded step."""
    padding = step.num_padding or [0] * len(step.request_ids)
    rows = list(zip(step.num_computed, step.num_scheduled, padding, strict=True))
    return StepShape(
        num_tokens=sum(step.num_scheduled) + sum(padding),
        num_seqs=len(rows),
        num_sampled=sum(map(bool, step.num_new)) + sum(start > 0 and not count for start, count, _ in rows),
        num_context=sum(start + count for start, count, _ in rows),
        num_pairs=sum(
            num_causal_pairs(start, count) if count else num_padding_pairs(start, padded)
            for start, count, padded in rows
        ),
    )
