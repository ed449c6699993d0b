"""`benchmarks.cache_lifetime` counts hits, prefill and memory of prefixes that are kept for a fixed time."""

from __future__ import annotations

import argparse
import json
import sys

import pytest

from benchmarks import cache_lifetime
from chairlift.lab.workload.request import WorkloadRequest

SPEEDS = argparse.Namespace(prefill=0.0, decode=cache_lifetime.SCALE)


def test_a_prefix_is_found_until_its_time_is_over() -> None:
    """Outputs take a second for each token; the system prompt has 160 tokens at this scale."""
    first = WorkloadRequest("a", 0.0, [1] * 200, 10)
    second = WorkloadRequest("b", 30.0, [1] * 40, 10, follows="a", continues="a")
    third = WorkloadRequest("c", 90.0, [1] * 50, 10, follows="b", continues="b")
    workload = [first, second, third]
    short, long = (cache_lifetime.measure(workload, ttl, SPEEDS) for ttl in (60.0, 3600.0))
    scale, prompts = cache_lifetime.SCALE, 200 + 250 + 310
    assert long["prefill tokens"] == pytest.approx((200 - 160 + 40 + 50) / scale)
    assert short["prefill tokens"] == pytest.approx((200 - 160 + 40 + 310 - 160) / scale)
    assert short["hit rate"] == pytest.approx(1 - (200 - 160 + 40 + 310 - 160) / prompts)
    computed = 10 * prompts
    assert short["tokens held"] == pytest.approx((computed + 30 * 210 + 60 * 260 + 60 * 320) / 150 / scale)
    assert long["tokens held"] == pytest.approx((computed + 30 * 210 + 90 * 260 + 3600 * 320) / 150 / scale)


def test_the_table_has_each_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["cache_lifetime", "--sessions", "20", "--json"])
    assert cache_lifetime.main() == 0
    results = json.loads(capsys.readouterr().out)["results"]
    rates = [values["hit rate"] for values in results.values()]
    assert list(results) == list(cache_lifetime.TTLS)
    assert 0.5 < rates[0] <= rates[1] <= rates[2] <= rates[3] < 1
    assert results["1 minute"]["tokens held"] < results["1 hour"]["tokens held"]
