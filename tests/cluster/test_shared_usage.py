"""Limits of keys over several ingresses."""

from __future__ import annotations

import asyncio

import pytest

from chairlift.cluster import cluster_app
from chairlift.cluster.cluster_app import share_usage
from chairlift.cluster.usage_aggregator import SharedUsage, UsageAggregator
from chairlift.errors import OverloadedError
from chairlift.server.access.admission import AdmissionController
from chairlift.server.access.keys import Key, KeyRing, digest

INFO = Key("team")

Usage = SharedUsage[tuple[str, str]]


class Ingresses:
    """Admission controllers with one clock, which exchange their usage at every `sync`."""

    def __init__(self, count: int, limits: dict[str, float]) -> None:
        self.now = 0.0
        self.aggregator: UsageAggregator[tuple[str, str]] = UsageAggregator()
        self.ring = KeyRing([Key("team", digest("secret-of-team-0123456789"), **limits)])
        self.all: list[AdmissionController] = []
        for _ in range(count):
            self.add()

    def add(self) -> None:
        """Start one more ingress."""
        self.all.append(AdmissionController(None, self.ring, clock=lambda: self.now))

    def sync(self) -> None:
        for index, admission in enumerate(self.all):
            usage = SharedUsage(admission.take_usage(), admission.num_concurrent())
            remote = self.aggregator.exchange(str(index), usage, self.now)
            admission.charge_remote_usage(remote.amounts, remote.num_concurrent)

    def admits(self, index: int) -> bool:
        try:
            with self.all[index].open_call(INFO) as permit:
                permit.admit([[1, 2, 3]])
            permit.close()
        except OverloadedError:
            return False
        return True

    def run(self, seconds: int, calls: tuple[int, ...]) -> int:
        """Send one call to each of these ingresses every 0.1 s; returns the number of admitted calls."""
        num_admitted = 0
        for _ in range(10 * seconds):
            self.now += 0.1
            self.sync()
            num_admitted += sum(self.admits(index) for index in calls)
        return num_admitted


@pytest.mark.parametrize("limits", [{"requests_per_minute": 600}, {"tokens_per_minute": 1800}])
def test_a_rate_holds_over_all_ingresses(limits: dict[str, float]) -> None:
    """A key with 10 requests per second that sends 40 to two ingresses gets 10 per second, after its first minute."""
    ingresses = Ingresses(2, limits)
    first = ingresses.run(60, (0, 1, 0, 1))
    steady = ingresses.run(60, (0, 1, 0, 1))
    assert steady / 60 == pytest.approx(10, rel=0.1)
    assert first + steady <= 600 + 120 * 10 + 4


def test_without_reports_each_ingress_has_its_own_limit() -> None:
    ingresses = Ingresses(2, {"requests_per_minute": 5})
    assert sum(ingresses.admits(index % 2) for index in range(20)) == 10


def test_a_new_ingress_admits_a_key_that_others_have_served_for_an_hour() -> None:
    ingresses = Ingresses(1, {"requests_per_minute": 600})
    ingresses.run(3600, (0,))
    ingresses.add()
    assert ingresses.run(10, (0, 1)) >= 195


def test_a_restarted_aggregator_charges_no_key_again() -> None:
    ingresses = Ingresses(2, {"requests_per_minute": 600})
    ingresses.run(600, (0,))
    ingresses.aggregator = UsageAggregator()
    ingresses.sync()
    ingresses.sync()
    assert sum(ingresses.admits(1) for _ in range(500)) == 500


def test_concurrent_calls_count_over_all_ingresses() -> None:
    ingresses = Ingresses(2, {"max_concurrent": 2})
    permits = [ingresses.all[0].open_call(INFO) for _ in range(2)]
    assert ingresses.admits(1)
    ingresses.sync()
    with pytest.raises(OverloadedError, match=r"has 2 sequences .* in progress, .* and the limit is max_concurrent=2"):
        ingresses.all[1].open_call(INFO)
    for permit in permits:
        permit.close()
    ingresses.sync()
    assert ingresses.admits(1)


def test_use_of_other_ingresses_counts_towards_the_limit_and_not_as_own_use() -> None:
    ingresses = Ingresses(2, {"requests_per_minute": 6})
    ingresses.sync()
    ingresses.all[0].charge_remote_usage({("team", "requests"): 7.0, ("unknown", "tokens"): 1.0}, {"unknown": 1})
    with pytest.raises(OverloadedError, match="requests_per_minute=6"):
        ingresses.all[0].open_call(INFO)
    assert ingresses.all[0].take_usage() == {}
    ingresses.now = 20.0
    ingresses.all[0].open_call(INFO).close()


async def test_without_an_aggregator_the_limits_are_those_of_the_ingress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its failure is logged once, calls of other ingresses do not count any more, and each report has the own usage."""
    monkeypatch.setattr(cluster_app, "PERIOD_SECONDS", 0.0)
    ingresses = Ingresses(1, {"max_concurrent": 2})
    admitted: list[bool] = []
    usages: list[Usage] = []
    permit = ingresses.all[0].open_call(INFO)
    permit.admit([[1, 2, 3]])

    async def exchange(_sender_id: str, usage: Usage) -> Usage:
        usages.append(usage)
        admitted.append(ingresses.admits(0))
        if len(admitted) == 2:
            return SharedUsage({}, {"team": 1})
        if len(admitted) == 6:
            raise asyncio.CancelledError
        raise TimeoutError

    with pytest.raises(asyncio.CancelledError):
        await share_usage(ingresses.all[0], exchange)
    permit.close()
    assert usages[0] == SharedUsage({("team", "requests"): 1.0, ("team", "tokens"): 3.0}, {"team": 1})
    assert admitted == [True, True, False, True, True, True]
    assert caplog.text.count("the limits of keys count only this ingress") == 1
