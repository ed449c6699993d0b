"""Fair sharing over replicas: what a replica measures, reports and charges."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from chairlift.cluster import shared_service
from chairlift.cluster.shared_service import ServiceMeter, share_service
from chairlift.cluster.usage_aggregator import SharedUsage


def test_prompt_tokens_cost_one_and_output_tokens_two() -> None:
    meter = ServiceMeter()
    meter.add("a", 10, 1)
    meter.add("a", 0, 4)
    assert meter.take() == {"a": 20.0}
    assert meter.take() == {}


def test_sharing_continues_after_a_failed_exchange(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_service, "PERIOD_SECONDS", 0.0)
    answers: list[Mapping[str, float] | Exception] = [{"a": 1.0}, ConnectionError("gone"), {"a": 2.0}, {}, {}]
    charges: list[Mapping[str, float]] = []
    reports: list[Mapping[str, float]] = []
    meter = ServiceMeter()
    meter.add("b", 4, 1)

    async def exchange(_sender_id: str, usage: SharedUsage[str]) -> SharedUsage[str]:
        if not answers:
            raise asyncio.CancelledError
        reports.append(usage.amounts)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SharedUsage(answer)

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await share_service(meter.take, charges.append, exchange)

    asyncio.run(main())
    assert charges == [{"a": 1.0}, {}, {"a": 2.0}, {}]
    assert reports == [{"b": 6.0}, {}, {}, {}, {}]
    assert "fair sharing counts only this replica" in caplog.text
