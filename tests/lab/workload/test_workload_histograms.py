"""Lengths from published histograms, and pairs within a limit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift.lab.workload.lengths import LengthDistribution, histogram_draw, paired_lengths, parse_lengths


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("name", "printed_mean"),
    [("sharegpt-input", 161.31), ("sharegpt-output", 337.99), ("alpaca-input", 19.31), ("alpaca-output", 58.45)],
)
def test_means_of_the_published_histograms(name: str, printed_mean: float) -> None:
    """The figures print the means; a bin is 4 to 16 tokens wide."""
    lengths = parse_lengths(f"hist:{name}").sample(rng(), 50_000)
    assert np.mean(lengths) == pytest.approx(printed_mean, rel=0.02)


def test_share_of_a_bin_is_its_count() -> None:
    counts = [3, 0, 5, 2]
    lengths = histogram_draw(10, 50, counts)(rng(), 50_000)
    assert np.histogram(lengths, 4, (10, 50))[0] / 5000 == pytest.approx(counts, rel=0.05)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    st.integers(0, 50),
    st.integers(1, 100),
    st.integers(0, 99),
)
def test_empty_bins_are_never_drawn(counts: list[int], start: int, width: int, seed: int) -> None:
    histogram = histogram_draw(start, start + width * len(counts), counts)
    for length in LengthDistribution("", histogram).sample(rng(seed), 20):
        assert length >= 1
        low, high = (max(0, min(len(counts) - 1, int((length + d - start) // width))) for d in (-0.5, 0.5))
        assert any(counts[low : high + 1])


def test_text_may_have_a_range() -> None:
    histogram = parse_lengths("hist:alpaca-output,8..64,reject")
    assert (histogram.low, histogram.high, histogram.reject) == (8, 64, True)
    assert str(histogram) == "hist:alpaca-output,8..64,reject"
    lengths = histogram.sample(rng(), 2000)
    assert min(lengths) >= 8
    assert max(lengths) <= 64
    assert parse_lengths("hist:alpaca-output,8..64").sample(rng(), 2000).count(64) > 200


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hist:sharegpt", "must be one of alpaca-input, .*, got 'sharegpt'"),
        ("hist:nowhere.json-input", "must be one of alpaca-input, .*, got 'nowhere.json-input'"),
        ("hist", "write hist:NAME"),
        ("hist:sharegpt-input,9", "write hist:NAME"),
    ],
)
def test_unknown_names_are_rejected(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_lengths(text)


def test_pairs_fit_and_are_independent() -> None:
    prompt, output = parse_lengths("hist:sharegpt-input"), parse_lengths("hist:sharegpt-output")
    pairs = paired_lengths(prompt, output, 2048, rng(), 20_000)
    assert len(pairs) == 20_000
    assert max(map(sum, pairs)) <= 2048
    assert abs(np.corrcoef(np.array(pairs).T)[0, 1]) < 0.05
    assert pairs == paired_lengths(prompt, output, 2048, rng(), 20_000)


@given(st.integers(2, 60), st.integers(0, 40))
def test_pairs_within_any_limit(limit: int, count: int) -> None:
    pairs = paired_lengths(parse_lengths("uniform:1..30"), parse_lengths("uniform:1..30"), limit, rng(), count)
    assert len(pairs) == count
    assert all(sum(pair) <= limit for pair in pairs)


def test_pairs_that_never_fit_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"0 of 100000 pairs of fixed:5 prompt and fixed:6 output tokens fit into 10"):
        paired_lengths(parse_lengths("fixed:5"), parse_lengths("fixed:6"), 10, rng(), 1)
