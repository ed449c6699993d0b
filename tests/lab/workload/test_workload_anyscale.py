"""The Anyscale workload equals the published one in every token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from chairlift.errors import ConfigError
from chairlift.lab.workload.anyscale import anyscale_workload
from chairlift.lab.workload.lengths import parse_lengths

PUBLISHED_SUMS = {32: 15_610, 128: 54_331, 512: 122_108, 1536: 129_570}


@pytest.mark.parametrize("cap", PUBLISHED_SUMS)
def test_output_lengths_have_the_known_sums(cap: int) -> None:
    workload = anyscale_workload(cap)
    assert len(workload) == 1000
    assert {len(r.prompt_token_ids) for r in workload} == {512}
    assert {r.arrival for r in workload} == {0.0}
    assert sum(r.output_len for r in workload) == PUBLISHED_SUMS[cap]
    assert max(r.output_len for r in workload) <= cap
    assert 40_000 < max(max(r.prompt_token_ids) for r in workload) <= 50_000
    assert min(r.output_len for r in workload) == 1


def test_static_batches_need_the_published_iterations() -> None:
    lens = [r.output_len for r in anyscale_workload(1536)]
    assert max(lens) == 843
    batches = [lens[i : i + 4] for i in range(0, len(lens), 4)]
    assert len(batches) * max(lens) == 210_750
    assert sum(map(max, batches)) == 66_942


def test_latency_workload() -> None:
    slow, fast = (anyscale_workload(1536, 100, request_rate=rate) for rate in (1.0, 4.0))
    assert len(slow) == 100
    lens = [len(r.prompt_token_ids) for r in slow]
    assert 1 <= min(lens) < 30
    assert 480 < max(lens) <= 512
    assert [r.output_len for r in fast] == [r.output_len for r in slow]
    assert slow[0].arrival == 0
    assert np.diff([r.arrival for r in slow]).mean() == pytest.approx(1.0, rel=0.25)
    assert [r.arrival for r in fast] == pytest.approx([r.arrival / 4 for r in slow])


@pytest.mark.parametrize("options", [{"cap": 0}, {"cap": 32, "count": 0}, {"cap": 32, "request_rate": 0.0}])
def test_invalid_numbers_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cap and count must be at least 1, and request_rate a positive number"):
        anyscale_workload(**options)


def draw(text: str, count: int) -> list[int]:
    return parse_lengths(text).sample(np.random.default_rng(0), count)


def test_anyscale_distribution_returns_the_published_lengths() -> None:
    published = [request.output_len for request in anyscale_workload(1536)]
    assert draw("anyscale:1536", 1000) == published
    assert draw("anyscale:1536/4", 128) == [math.ceil(length / 4) for length in published[:128]]
    assert str(parse_lengths("anyscale:1536/4")) == "anyscale:1536/4"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("anyscale", "write anyscale:CAP"),
        ("anyscale:x/2", "write anyscale:CAP"),
        ("anyscale:32/", "write anyscale:CAP"),
        ("anyscale:32/0", "DIVISOR must be at least 1, got 0"),
        ("anyscale:0", "CAP must be at least 1, got 0"),
        ("anyscale:32,8..16", "write anyscale:CAP"),
    ],
)
def test_invalid_distribution_text_is_rejected(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_lengths(text)


def test_more_requests_than_published_are_rejected() -> None:
    with pytest.raises(ConfigError, match="count must be at most 1000, the published number, got 1001"):
        draw("anyscale:32", 1001)
