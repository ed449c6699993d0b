"""The usage aggregator and its senders: what senders are charged, with and without failures."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.cluster.usage_aggregator import (
    SENDER_TIMEOUT_SECONDS,
    SharedUsage,
    UsageAggregator,
    UsageSender,
    exchange_periodically,
)

Outcome = Literal["answered", "report lost", "answer lost"]

AMOUNTS = st.dictionaries(st.sampled_from("ab"), st.integers(1, 100).map(float))
NAMES = st.sampled_from("123")
OUTCOMES = st.sampled_from(("answered", "report lost", "answer lost"))


class Senders:
    """Three senders of one aggregator, with what each has used and what it was charged for.

    Attributes:
        due: what each sender has to be charged for: the usage of the others that was reported after its first report.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.aggregator: UsageAggregator[str] = UsageAggregator()
        self.senders: dict[str, UsageSender[str]] = {name: UsageSender(name, 0.0) for name in "123"}
        self.charged = {name: dict.fromkeys("ab", 0.0) for name in "123"}
        self.used = {name: dict.fromkeys("ab", 0.0) for name in "123"}
        self.due = {name: dict.fromkeys("ab", 0.0) for name in "123"}
        self.joined: set[str] = set()

    def exchange(self, name: str, amounts: Mapping[str, float], outcome: Outcome = "answered") -> dict[str, float]:
        """Exchange usage, and return what the sender was charged for."""
        sender = self.senders[name]
        report = SharedUsage(sender.report(amounts, self.now))
        for tenant, amount in amounts.items():
            self.used[name][tenant] += amount
            for other in self.joined - {name}:
                self.due[other][tenant] += amount
        if outcome == "report lost":
            return {}
        answer = self.aggregator.exchange(name, sender.number, report, self.now)
        self.joined.add(name)
        if outcome == "answer lost":
            return {}
        sender.acknowledge(self.now)
        for tenant, amount in answer.amounts.items():
            self.charged[name][tenant] += amount
        return dict(answer.amounts)

    def used_by_others(self, name: str) -> dict[str, float]:
        return {tenant: sum(self.used[other][tenant] for other in "123" if other != name) for tenant in "ab"}

    def exchange_all(self) -> None:
        """Let all senders report what is left, and then receive it."""
        for name in "123123":
            self.exchange(name, {})


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
    for name, amounts in reports:
        senders.exchange(name, amounts)
    senders.exchange_all()
    assert senders.charged == senders.due


@given(st.lists(st.tuples(NAMES, AMOUNTS, OUTCOMES), max_size=40))
def test_lost_reports_and_answers_neither_lose_nor_repeat_an_amount(
    reports: list[tuple[str, dict[str, float], Outcome]],
) -> None:
    senders = Senders()
    senders.exchange_all()
    for name, amounts, outcome in reports:
        senders.now += SENDER_TIMEOUT_SECONDS / 100
        senders.exchange(name, amounts, outcome)
    senders.exchange_all()
    assert senders.charged == {name: senders.used_by_others(name) for name in "123"}


@given(
    st.lists(st.tuples(NAMES, AMOUNTS), max_size=20),
    st.lists(st.tuples(NAMES, AMOUNTS), max_size=5),
    st.lists(st.tuples(NAMES, AMOUNTS), max_size=20),
)
def test_a_restarted_aggregator_charges_nothing_twice_and_nothing_of_the_past(
    before: list[tuple[str, dict[str, float]]],
    meanwhile: list[tuple[str, dict[str, float]]],
    after: list[tuple[str, dict[str, float]]],
) -> None:
    senders = Senders()
    for name, amounts in before:
        senders.exchange(name, amounts)
    senders.exchange_all()
    charged = {name: dict(each) for name, each in senders.charged.items()}
    senders.used = {name: dict.fromkeys("ab", 0.0) for name in "123"}
    for name, amounts in meanwhile:
        senders.exchange(name, amounts, "report lost")
    senders.aggregator = UsageAggregator()
    assert senders.exchange("1", {}) == {}
    senders.exchange("2", {})
    senders.exchange("3", {})
    for name, amounts in after:
        senders.exchange(name, amounts)
    senders.exchange_all()
    for name, known in charged.items():
        new = {tenant: senders.charged[name][tenant] - known[tenant] for tenant in "ab"}
        assert all(new[tenant] <= senders.used_by_others(name)[tenant] for tenant in "ab")
        if not meanwhile:
            assert new == senders.used_by_others(name)


def test_amounts_without_an_answer_are_dropped_after_the_timeout() -> None:
    """The rate limits of tenants have recovered from them, and the other senders would charge them at once."""
    senders = Senders()
    senders.exchange_all()
    for senders.now in (1.0, SENDER_TIMEOUT_SECONDS / 2, SENDER_TIMEOUT_SECONDS - 1):
        senders.exchange("1", {"a": 100.0}, "report lost")
        senders.exchange("2", {})
    senders.now = SENDER_TIMEOUT_SECONDS
    senders.exchange("1", {"a": 1.0})
    assert senders.exchange("2", {}) == {"a": 1.0}


def test_answers_that_are_lost_for_longer_than_the_timeout_are_not_charged_and_nothing_is_refunded() -> None:
    senders = Senders()
    senders.exchange_all()
    for senders.now in range(1, int(SENDER_TIMEOUT_SECONDS)):
        senders.exchange("1", {"b": 1.0}, "answer lost")
        senders.exchange("2", {"a": 1.0})
    senders.now = SENDER_TIMEOUT_SECONDS
    assert senders.exchange("1", {"b": 1.0}) == {"a": 1.0}
    senders.exchange("2", {})
    assert senders.charged["2"] == {"a": 0.0, "b": SENDER_TIMEOUT_SECONDS}


def test_a_silent_sender_is_removed() -> None:
    """Its calls in progress do not count any more, and it is charged nothing of what it has missed."""
    aggregator: UsageAggregator[str] = UsageAggregator()
    aggregator.exchange("1", 0, SharedUsage({"a": 7.0}, {"a": 3}), now=0.0)
    last = SENDER_TIMEOUT_SECONDS - 0.1
    assert aggregator.exchange("2", 0, SharedUsage({"a": 5.0}), now=last) == SharedUsage({}, {"a": 3})
    assert aggregator.exchange("2", 1, SharedUsage(), now=SENDER_TIMEOUT_SECONDS) == SharedUsage()
    assert aggregator.exchange("1", 1, SharedUsage({"a": 1.0}), now=SENDER_TIMEOUT_SECONDS) == SharedUsage()
    assert aggregator.exchange("2", 2, SharedUsage(), now=SENDER_TIMEOUT_SECONDS) == SharedUsage({"a": 1.0})


def test_calls_in_progress_are_the_sum_of_the_last_reports_of_the_others() -> None:
    aggregator: UsageAggregator[str] = UsageAggregator()
    aggregator.exchange("1", 0, SharedUsage({}, {"a": 3, "b": 1}), now=0.0)
    aggregator.exchange("2", 0, SharedUsage({}, {"a": 2}), now=0.0)
    assert aggregator.exchange("3", 0, SharedUsage({}, {"a": 9}), now=0.0).num_concurrent == {"a": 5, "b": 1}
    aggregator.exchange("1", 1, SharedUsage({}, {"a": 1}), now=0.1)
    assert aggregator.exchange("3", 0, SharedUsage(), now=0.1).num_concurrent == {"a": 3}


def test_the_loop_repeats_unanswered_amounts_and_clears_remote_calls_after_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answered = SharedUsage({"a": 1.0}, {"a": 2})
    answers: list[SharedUsage[str] | Exception] = [
        answered, ConnectionError("gone"), TimeoutError(), answered, SharedUsage(), SharedUsage(),
    ]  # fmt: skip
    reports: list[tuple[int, Mapping[str, float]]] = []
    charges: list[SharedUsage[str]] = []

    async def exchange(_sender_id: str, number: int, usage: SharedUsage[str]) -> SharedUsage[str]:
        if not answers:
            raise asyncio.CancelledError
        reports.append((number, usage.amounts))
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await exchange_periodically(
                lambda: SharedUsage({"b": 1.0}), charges.append, exchange, 0.0, "less is shared"
            )

    asyncio.run(main())
    assert charges == [answered, SharedUsage(), answered, SharedUsage()]
    assert reports == [(number, {"b": amount}) for number, amount in ((0, 1), (1, 1), (1, 2), (1, 3), (2, 1), (3, 1))]
    assert caplog.text.count("less is shared, because the usage aggregator does not answer: ConnectionError") == 1
    assert caplog.text.count("less is shared") == 1
