"""Estimates of acceptance follow recent results of the request, and begin with those of all requests."""

from __future__ import annotations

from chairlift.core.speculation.acceptance import PRIOR_PROBABILITY, AcceptanceEstimates


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
