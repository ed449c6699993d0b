"""The number of draft tokens is the one with the largest expected rate of output tokens."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.speculation.draft_counts import MIN_SPEEDUP, DraftCost, choose_counts
from chairlift.step_time import RowTime


def rate(
    counts: tuple[int, ...], probabilities: list[float], num_rows: int, num_sampled: int, cost: DraftCost
) -> float:
    assert cost.verification is not None
    pairs = zip(probabilities, counts, strict=True)
    expected = num_sampled + sum(p**position for p, count in pairs for position in range(1, count + 1))
    seconds = cost.verification.seconds(num_rows + sum(counts))
    if cost.proposal is not None:
        for position in range(max(counts, default=0)):
            seconds += cost.proposal.seconds(sum(count > position for count in counts))
    return expected / seconds


@given(
    requests=st.lists(st.tuples(st.floats(0.01, 0.99), st.integers(1, 3)), min_size=1, max_size=3),
    seconds=st.lists(st.floats(1, 30), min_size=4, max_size=4).map(sorted),
    others=st.integers(0, 2),
    room=st.integers(1, 8),
)
@settings(max_examples=200, deadline=None)
def test_without_a_draft_model_no_other_choice_is_better(
    requests: list[tuple[float, int]], seconds: list[float], others: int, room: int
) -> None:
    probabilities, limits = [p for p, _ in requests], [limit for _, limit in requests]
    cost = DraftCost(RowTime(dict(zip((1, 2, 4, 8), seconds, strict=True))))
    num_rows = len(requests) + others
    chosen = tuple(choose_counts(probabilities, limits, num_rows, num_rows, room, cost))
    choices = [c for c in product(*(range(limit + 1) for limit in limits)) if sum(c) <= room]
    rates = {c: rate(c, probabilities, num_rows, num_rows, cost) for c in choices}
    nothing = (0,) * len(requests)
    best = max(rates.values())
    if best <= MIN_SPEEDUP * rates[nothing]:
        assert chosen == nothing
    else:
        assert rates[chosen] >= best * (1 - 1e-9)


def test_a_draft_model_costs_time_for_each_position() -> None:
    verification = RowTime({1: 10.0, 8: 10.5})
    free, cheap, dear = (DraftCost(verification, proposal) for proposal in (None, _constant(1.0), _constant(20.0)))
    assert choose_counts([0.6], [4], 1, 1, 8, free) == [4]
    assert choose_counts([0.6], [4], 1, 1, 8, cheap) == [3]
    assert choose_counts([0.6], [4], 1, 1, 8, dear) == [0]
    assert dear.best_speedup(1, 1, 8) < 1 < cheap.best_speedup(1, 1, 8)


def test_several_draft_tokens_may_pay_where_one_does_not() -> None:
    cost = DraftCost(RowTime({1: 10.0, 2: 20.0, 4: 20.0}))
    assert cost.best_speedup(1, 1, 1) == 1.0
    assert cost.best_speedup(1, 1, 3) == 2.0
    assert choose_counts([0.99], [3], 1, 1, 3, cost) == [3]


def test_the_room_is_shared_by_probability() -> None:
    cost = DraftCost(RowTime({1: 1.0, 64: 1.0}))
    assert choose_counts([0.9, 0.3], [8, 8], 2, 2, 4, cost) == [4, 0]
    assert choose_counts([0.9, 0.8], [8, 8], 2, 2, 4, cost) == [3, 1]


def test_without_times_all_room_is_used_in_order() -> None:
    assert choose_counts([0.1, 0.9], [3, 3], 2, 2, 4, DraftCost()) == [3, 1]


def _constant(seconds: float) -> RowTime:
    return RowTime({1: seconds, 64: seconds})
