"""The usage aggregator: what senders are charged, with and without failures."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.cluster.usage_aggregator import (
    SENDER_TIMEOUT_SECONDS,
    ServiceMeter,
    SharedUsage,
    UsageAggregator,
    exchange_periodically,
)

AMOUNTS = st.dictionaries(st.sampled_from("ab"), st.integers(1, 100).map(float))
NAMES = st.sampled_from("123")


class Senders:
    """Three senders of one aggregator, with what each was charged for.

    Attributes:
        due: what each sender has to be charged for: the usage of the others that was reported after its first report.
    """

    def __init__(self) -> None:
        self.aggregator: UsageAggregator[str] = UsageAggregator()
        self.charged = {name: dict.fromkeys("ab", 0.0) for name in "123"}
        self.due = {name: dict.fromkeys("ab", 0.0) for name in "123"}
        self.joined: set[str] = set()

    def exchange(self, name: str, amounts: Mapping[str, float], now: float = 0.0) -> Mapping[str, float]:
        """Exchange usage, and return what the sender was charged for."""
        for other in self.joined - {name}:
            for tenant, amount in amounts.items():
                self.due[other][tenant] += amount
        self.joined.add(name)
        answer = self.aggregator.exchange(name, SharedUsage(amounts), now).amounts
        for tenant, amount in answer.items():
            self.charged[name][tenant] += amount
        return answer


def test_a_late_sender_is_charged_nothing_of_the_past() -> None:
    senders = Senders()
    senders.exchange("2", {})
    senders.exchange("1", {"a": 1000.0})
    senders.exchange("1", {"a": 1000.0})
    assert senders.exchange("3", {"a": 1.0}) == {}
    senders.exchange("1", {"a": 5.0})
    assert senders.exchange("3", {"b": 1.0}) == {"a": 5.0}
    assert senders.exchange("1", {}) == {"b": 1.0}


@given(st.lists(st.tuples(NAMES, AMOUNTS), max_size=40))
def test_each_sender_is_charged_for_what_the_others_report_after_its_first_report(
    reports: list[tuple[str, dict[str, float]]],
) -> None:
    senders = Senders()
    for name, amounts in [*reports, *((name, {}) for name in "123")]:
        senders.exchange(name, amounts)
    assert senders.charged == senders.due


def test_a_restarted_aggregator_charges_nothing_of_the_past() -> None:
    senders = Senders()
    for name in "121":
        senders.exchange(name, {"a": 7.0})
    senders.aggregator = UsageAggregator()
    assert senders.exchange("2", {"b": 1.0}) == senders.exchange("1", {"b": 2.0}) == {}
    assert senders.exchange("2", {}) == {"b": 2.0}


def test_a_silent_sender_is_removed() -> None:
    """Its calls in progress do not count any more, and it is charged nothing of what it has missed."""
    aggregator: UsageAggregator[str] = UsageAggregator()
    aggregator.exchange("1", SharedUsage({"a": 7.0}, {"a": 3}), now=0.0)
    last = SENDER_TIMEOUT_SECONDS - 0.1
    assert aggregator.exchange("2", SharedUsage({"a": 5.0}), now=last) == SharedUsage({}, {"a": 3})
    assert aggregator.exchange("2", SharedUsage(), now=SENDER_TIMEOUT_SECONDS) == SharedUsage()
    assert aggregator.exchange("1", SharedUsage({"a": 1.0}), now=SENDER_TIMEOUT_SECONDS) == SharedUsage()
    assert aggregator.exchange("2", SharedUsage(), now=SENDER_TIMEOUT_SECONDS) == SharedUsage({"a": 1.0})


def test_calls_in_progress_are_the_sum_of_the_last_reports_of_the_others() -> None:
    aggregator: UsageAggregator[str] = UsageAggregator()
    aggregator.exchange("1", SharedUsage({}, {"a": 3, "b": 1}), now=0.0)
    aggregator.exchange("2", SharedUsage({}, {"a": 2}), now=0.0)
    assert aggregator.exchange("3", SharedUsage({}, {"a": 9}), now=0.0).num_concurrent == {"a": 5, "b": 1}
    aggregator.exchange("1", SharedUsage({}, {"a": 1}), now=0.1)
    assert aggregator.exchange("3", SharedUsage(), now=0.1).num_concurrent == {"a": 3}


async def test_the_loop_clears_remote_calls_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    answered = SharedUsage({"a": 1.0}, {"a": 2})
    answers: list[SharedUsage[str] | Exception] = [
        answered, ConnectionError("gone"), TimeoutError(), answered, SharedUsage(), SharedUsage(),
    ]  # fmt: skip
    reports: list[tuple[str, Mapping[str, float]]] = []
    charges: list[SharedUsage[str]] = []

    async def exchange(sender_id: str, usage: SharedUsage[str]) -> SharedUsage[str]:
        if not answers:
            raise asyncio.CancelledError
        reports.append((sender_id, usage.amounts))
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(asyncio.CancelledError):
        await exchange_periodically(lambda: SharedUsage({"b": 1.0}), charges.append, exchange, 0.0, "less is shared")
    assert charges == [answered, SharedUsage(), answered, SharedUsage()]
    assert reports == [(reports[0][0], {"b": 1.0})] * 6
    assert caplog.text.count("less is shared, because the usage aggregator does not answer: ConnectionError") == 1
    assert caplog.text.count("less is shared") == 1


def test_prompt_tokens_cost_one_and_output_tokens_two() -> None:
    meter = ServiceMeter()
    meter.add("a", 10, 1)
    meter.add("a", 0, 4)
    assert meter.take() == {"a": 20.0}
    assert meter.take() == {}
