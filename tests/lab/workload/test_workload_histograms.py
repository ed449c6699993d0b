"""Lengths from histograms: the published ones, those of a file, and pairs within a limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift.lab.workload.lengths import (
    FixedLength,
    HistogramLengths,
    LengthRange,
    UniformLengths,
    paired_lengths,
    parse_lengths,
)


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
    histogram = HistogramLengths.load("sharegpt-output")
    lengths = np.array(histogram.sample(rng(), 50_000))
    width = (histogram.end - histogram.start) / len(histogram.counts)
    edge = histogram.start + 49 * width
    assert np.mean(lengths > edge) == pytest.approx(sum(histogram.counts[49:]) / sum(histogram.counts), rel=0.05)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    st.integers(0, 50),
    st.integers(1, 100),
    st.integers(0, 99),
)
def test_empty_bins_are_never_drawn(counts: list[int], start: int, width: int, seed: int) -> None:
    histogram = HistogramLengths("own-input", start, start + width * len(counts), tuple(counts))
    for length in histogram.sample(rng(seed), 20):
        assert length >= 1
        low, high = (max(0, min(len(counts) - 1, int((length + d - start) // width))) for d in (-0.5, 0.5))
        assert any(counts[low : high + 1])


def test_text_may_have_a_range() -> None:
    histogram = parse_lengths("hist:alpaca-output,8..64,reject")
    assert histogram == HistogramLengths.load("alpaca-output", LengthRange(8, 64, reject=True))
    assert str(histogram) == "hist:alpaca-output,8..64,reject"
    lengths = histogram.sample(rng(), 2000)
    assert min(lengths) >= 8
    assert max(lengths) <= 64
    assert parse_lengths("hist:alpaca-output,8..64").sample(rng(), 2000).count(64) > 200


def write(folder: Path, content: Any) -> str:
    path = folder / "my-own.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_histogram_of_a_file(tmp_path: Path) -> None:
    name = write(tmp_path, {"source": "mine", "input": {"lo": 10, "hi": 30, "bins": 2, "counts": [0, 3]}})
    assert HistogramLengths.load(f"{name}-input") == HistogramLengths(f"{name}-input", 10.0, 30.0, (0, 3))
    lengths = parse_lengths(f"hist:{name}-input").sample(rng(), 500)
    assert set(lengths) == set(range(20, 31))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", r"'input' must be an object with lo, hi, bins and counts"),
        ({"output": {}}, r"'input' must be an object"),
        ({"input": {"lo": 1, "hi": 9}}, r"KeyError\('counts'\)"),
        ({"input": {"lo": 9, "hi": 9, "counts": [1]}}, r"0 <= lo < hi, got 9 and 9"),
        ({"input": {"lo": 1, "hi": 9, "counts": [1, -2]}}, r"input.counts must be integers >= 0, got -2"),
        ({"input": {"lo": 1, "hi": 9, "counts": [0, 0]}}, r"input.counts must not all be 0"),
        ({"input": {"lo": 1, "hi": 9, "bins": 3, "counts": [1, 2]}}, r"input.bins is 3, but there are 2 counts"),
    ],
)
def test_invalid_files_are_rejected(tmp_path: Path, content: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        HistogramLengths.load(write(tmp_path, content) + "-input")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hist:sharegpt", "NAME-input or NAME-output, got 'sharegpt'"),
        ("hist:-input", "NAME-input or NAME-output, got '-input'"),
        ("hist:nowhere.json-input", r"nowhere.json: cannot be read .* NAME is alpaca or sharegpt"),
        ("hist", "NAME is missing"),
        ("hist:sharegpt-input,9", "'9' is one argument too many"),
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
    pairs = paired_lengths(UniformLengths(1, 30), UniformLengths(1, 30), limit, rng(), count)
    assert len(pairs) == count
    assert all(sum(pair) <= limit for pair in pairs)


def test_pairs_that_never_fit_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"0 of 100000 pairs of fixed:5 prompt and fixed:6 output tokens fit into 10"):
        paired_lengths(FixedLength(5), FixedLength(6), 10, rng(), 1)
