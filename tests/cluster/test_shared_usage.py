"""Limits of keys over several ingresses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from chairlift.cluster import shared_usage
from chairlift.cluster.shared_usage import UsageBoard, share_usage
from chairlift.errors import OverloadedError
from chairlift.sampling_params import SamplingParams
from chairlift.server.access.admission import AdmissionController
from chairlift.server.access.keys import Key, KeyInfo, KeyLimits, KeyRing, digest
from chairlift.server.access.rate_limits import KeyUsage

INFO = KeyInfo("team", "team", is_admin=False)


class Ingresses:
    """Admission controllers with one clock, which report to one board at every `sync`."""

    def __init__(self, count: int, limits: KeyLimits) -> None:
        self.now = 0.0
        self.board = UsageBoard()
        ring = KeyRing([Key(INFO, digest("secret-of-team-0123456789"), limits)])
        self.all = [AdmissionController(None, ring, clock=lambda: self.now) for _ in range(count)]

    def sync(self) -> None:
        for index, admission in enumerate(self.all):
            admission.set_remote_usage(self.board.exchange(str(index), admission.usage()))

    def admits(self, index: int) -> bool:
        try:
            self.all[index].admit(INFO, [[1, 2, 3]], SamplingParams()).close()
        except OverloadedError:
            return False
        return True


def test_a_rate_holds_over_all_ingresses() -> None:
    """A key with 10 requests per second that sends 40 to two ingresses gets 10 per second, after its first minute."""
    ingresses = Ingresses(2, KeyLimits(requests_per_minute=600))
    admitted = []
    for tick in range(1200):  # of 0.1 s, two requests to each ingress
        ingresses.now = tick / 10
        ingresses.sync()
        admitted.append(sum(ingresses.admits(index) for index in (0, 1, 0, 1)))
    steady = admitted[600:]
    assert sum(steady) / 60 == pytest.approx(10, rel=0.1)
    assert sum(admitted) <= 600 + 120 * 10 + 4


def test_without_reports_each_ingress_has_its_own_limit() -> None:
    ingresses = Ingresses(2, KeyLimits(requests_per_minute=5))
    assert sum(ingresses.admits(index % 2) for index in range(20)) == 10


def test_concurrent_calls_count_over_all_ingresses() -> None:
    ingresses = Ingresses(2, KeyLimits(max_concurrent=2))
    permits = [ingresses.all[0].admit(INFO, [[1]], SamplingParams()) for _ in range(2)]
    assert ingresses.admits(1)
    ingresses.sync()
    with pytest.raises(OverloadedError, match="has 2 calls in progress, and its limit is max_concurrent=2"):
        ingresses.all[1].admit(INFO, [[1]], SamplingParams())
    for permit in permits:
        permit.close()
    ingresses.sync()
    assert ingresses.admits(1)


def test_totals_of_a_dead_ingress_stay_and_its_calls_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(shared_usage.time, "monotonic", lambda: now)
    board = UsageBoard()
    board.exchange("a", {"team": KeyUsage(3, 10.0, 20.0, 1.0)})
    assert board.exchange("b", {}) == {"team": KeyUsage(3, 10.0, 20.0, 1.0)}
    now = 111.0
    assert board.exchange("b", {}) == {"team": KeyUsage(0, 10.0, 20.0, 1.0)}


def test_an_error_of_the_board_is_logged_once_and_the_ingress_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_usage, "PERIOD_SECONDS", 0.001)
    calls = 0

    async def exchange(_ingress_id: str, _usage: Mapping[str, KeyUsage]) -> Mapping[str, KeyUsage]:
        nonlocal calls
        calls += 1
        raise TimeoutError("board")

    async def main() -> None:
        task = asyncio.create_task(share_usage(AdmissionController(), exchange))
        while calls < 5:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(main())
    assert caplog.text.count("limits of keys count only this ingress") == 1
