"""Fair sharing over replicas: what the board returns, and what a replica charges."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.cluster import shared_service
from chairlift.cluster.shared_service import SILENCE_SECONDS, ServiceBoard, ServiceMeter, share_service

REPORTS = st.lists(
    st.tuples(st.sampled_from("123"), st.dictionaries(st.sampled_from("ab"), st.integers(1, 100).map(float))),
    max_size=40,
)


def test_prompt_tokens_cost_one_and_output_tokens_two() -> None:
    meter = ServiceMeter()
    meter.add("a", 10, 1)
    meter.add("a", 0, 4)
    assert meter.take() == {"a": 20.0}
    assert meter.take() == {}


def test_a_new_replica_is_not_charged_for_the_past() -> None:
    board = ServiceBoard()
    board.exchange("1", {"a": 1000.0})
    assert board.exchange("2", {}) == {}
    board.exchange("1", {"a": 5.0})
    assert board.exchange("2", {"b": 1.0}) == {"a": 5.0}
    assert board.exchange("1", {}) == {"b": 1.0}


@given(REPORTS)
def test_each_replica_is_charged_once_for_the_service_of_the_others(
    reports: list[tuple[str, dict[str, float]]],
) -> None:
    board = ServiceBoard()
    for name in "123":
        board.exchange(name, {})
    charged = {name: dict.fromkeys("ab", 0.0) for name in "123"}
    given_by = {name: dict.fromkeys("ab", 0.0) for name in "123"}
    for name, service in [*reports, ("1", {}), ("2", {}), ("3", {})]:
        for tenant, amount in service.items():
            given_by[name][tenant] += amount
        for tenant, amount in board.exchange(name, service).items():
            charged[name][tenant] += amount
    for name in "123":
        others = [given_by[other] for other in "123" if other != name]
        assert charged[name] == {tenant: sum(each[tenant] for each in others) for tenant in "ab"}


def test_a_silent_replica_is_forgotten_and_its_service_is_kept() -> None:
    board = ServiceBoard()
    board.exchange("1", {"a": 7.0}, now=0.0)
    board.exchange("2", {}, now=0.0)
    board.exchange("2", {}, now=SILENCE_SECONDS)
    assert board.exchange("1", {"a": 1.0}, now=SILENCE_SECONDS) == {}
    assert board.exchange("2", {}, now=SILENCE_SECONDS) == {"a": 1.0}


def test_sharing_continues_after_a_failed_exchange(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_service, "PERIOD_SECONDS", 0.0)
    answers: list[Mapping[str, float] | Exception] = [{"a": 1.0}, ConnectionError("gone"), {"a": 2.0}, {}, {}]
    charges: list[Mapping[str, float]] = []

    async def exchange(_service: Mapping[str, float]) -> Mapping[str, float]:
        if not answers:
            raise asyncio.CancelledError
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await share_service(ServiceMeter().take, charges.append, exchange)

    asyncio.run(main())
    assert charges == [{"a": 1.0}, {}, {"a": 2.0}, {}]
    assert "fair sharing counts only this replica" in caplog.text
