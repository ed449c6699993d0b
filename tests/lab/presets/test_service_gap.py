"""The service of the clients of a preset: constant rates, the bound of VTC, and the gap of first come, first served."""

from __future__ import annotations

import pytest
from preset_studies import mean, run, systems

FCFS, VTC = "FCFS = fcfs", "VTC = fair"


def test_clients_send_at_constant_rates() -> None:
    requests = systems("vtc-figure-3", 0, None)[VTC].requests(0)
    assert len(requests) == 2250
    for client, gap in (("client 1", 60 / 90), ("client 2", 60 / 180)):
        times = [request.arrival for request in requests if request.tenant == client]
        assert times == pytest.approx([index * gap for index in range(len(times))])
    assert 499 < requests[-1].arrival < 500


def test_service_differs_by_the_rates_without_fairness_and_within_the_bound_with_it() -> None:
    """250 requests in a minute: the second client receives twice the service of the first."""
    result = run("vtc-figure-3", 0, 250)
    gap = mean(result, FCFS, "service_gap")
    assert gap == mean(result, FCFS, "largest_service_gap") > 20_000
    assert mean(result, VTC, "largest_service_gap") <= 2 * max(1 * 256, 2 * 10_000)
    assert mean(result, VTC, "service_gap") < gap / 10
