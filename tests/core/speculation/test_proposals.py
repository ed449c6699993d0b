"""Proposals by prompt lookup, estimates of their acceptance, and the number of draft tokens."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.speculation.acceptance import PRIOR_PROBABILITY, AcceptanceEstimates
from chairlift.core.speculation.draft_counts import MIN_SPEEDUP, DraftCost, choose_counts
from chairlift.core.speculation.prompt_lookup import MAX_CANDIDATES, PromptLookup, Proposal
from chairlift.step_time import RowTime


def searched(token_ids: list[int], min_match: int, max_match: int, max_tokens: int) -> Proposal | None:
    """The specification: compare the latest occurrences of the last tokens, and repeat what follows the best one."""
    size = len(token_ids)
    tail = token_ids[size - min_match :]
    ends = [end for end in range(min_match, size) if token_ids[end - min_match : end] == tail]
    best, best_length = None, 0
    for end in list(reversed(ends))[:MAX_CANDIDATES]:
        length = 0
        while length < min(max_match, end) and token_ids[end - length - 1] == token_ids[size - length - 1]:
            length += 1
        if length > best_length:
            best, best_length = end, length
    if best is None:
        return None
    tokens = list(token_ids)
    while len(tokens) < size + max_tokens:
        tokens.append(tokens[best + len(tokens) - size])
    return Proposal(tokens[size:], best_length)


@given(
    token_ids=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    min_match=st.integers(1, 4),
    extra_match=st.integers(0, 6),
    max_tokens=st.integers(1, 8),
    first=st.integers(1, 60),
)
@settings(max_examples=400, deadline=None)
def test_a_proposal_is_the_result_of_a_full_search(
    token_ids: list[int], min_match: int, extra_match: int, max_tokens: int, first: int
) -> None:
    lookup = PromptLookup(min_match, min_match + extra_match)
    for size in range(min(first, len(token_ids)), len(token_ids) + 1):
        known = token_ids[:size]
        expected = searched(known, min_match, min_match + extra_match, max_tokens) if size > min_match else None
        assert lookup.propose(known, max_tokens) == expected


def test_proposals_of_known_texts() -> None:
    assert PromptLookup(2, 8).propose([1, 2, 3, 1, 2], 7) == Proposal([3, 1, 2, 3, 1, 2, 3], 2)
    tokens = [1, 2, 3, 4, 9, 9, 2, 3, 5, 9, 9, 1, 2, 3]
    assert PromptLookup(2, 8).propose(tokens, 1) == Proposal([4], 3)
    lookup = PromptLookup(2, 8)
    assert lookup.propose([1], 4) is None
    assert lookup.propose([1, 2, 3, 4], 4) is None


def test_a_request_without_results_has_the_average_of_all() -> None:
    estimates = AcceptanceEstimates()
    assert estimates.probability("a", 2) == PRIOR_PROBABILITY
    for _ in range(100):
        estimates.record("a", 2, 0, 1)
    assert estimates.probability("b", 2) < 0.05
    assert estimates.probability("b", 20) == PRIOR_PROBABILITY, "long matches have an estimate of their own"


def test_an_estimate_follows_recent_results() -> None:
    estimates = AcceptanceEstimates()
    for _ in range(50):
        estimates.record("a", 5, 0, 1)
    assert estimates.probability("a", 5) < 0.1
    for _ in range(20):
        estimates.record("a", 5, 4, 4)
    assert estimates.probability("a", 5) > 0.9


def test_forgotten_requests_have_no_results() -> None:
    estimates = AcceptanceEstimates()
    estimates.record("a", 3, 9, 9)
    known = estimates.probability("a", 3)
    estimates.forget("a")
    assert estimates.probability("a", 3) < known


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
