"""Length distributions: bounds, moments, their text, published histograms and the Anyscale workload."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from scipy import stats

from chairlift.errors import ConfigError
from chairlift.lab.workload.anyscale import anyscale_workload
from chairlift.lab.workload.lengths import LengthDistribution, histogram_draw, paired_lengths, parse_lengths

MANY = 20_000


def draw(text: str, count: int = MANY, seed: int = 0) -> list[int]:
    return parse_lengths(text).sample(np.random.default_rng(seed), count)


def bounds() -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(1, 5000), st.integers(0, 5000)).map(lambda pair: (pair[0], sum(pair)))


def texts() -> st.SearchStrategy[tuple[str, int, int]]:
    """Texts of distributions, with the bounds of their lengths."""
    sizes = st.integers(1, 10**5)
    sigmas = st.floats(0, 4).map(lambda sigma: f"{sigma:.3f}")
    ends = st.sampled_from(["", ",reject"])
    unbounded = st.just(("", 1, 1 << 30))
    ranges = st.builds(lambda pair, end: (f",{pair[0]}..{pair[1]}{end}", *pair), bounds(), ends) | unbounded
    return st.one_of(
        st.integers(1, 5000).map(lambda length: (f"fixed:{length}", length, length)),
        bounds().map(lambda pair: (f"uniform:{pair[0]}..{pair[1]}", *pair)),
        st.builds(lambda size, sigma, rest: (f"lognormal:{size},{sigma}{rest[0]}", *rest[1:]), sizes, sigmas, ranges),
        st.builds(lambda size, rest: (f"exp:{size}{rest[0]}", *rest[1:]), sizes, ranges),
    )


@given(texts(), st.integers(0, 50), st.integers(0, 1000))
def test_samples_are_seeded_integers_within_bounds(given: tuple[str, int, int], count: int, seed: int) -> None:
    text, low, high = given
    distribution = parse_lengths(text)
    assert str(distribution) == text
    try:
        lengths = distribution.sample(np.random.default_rng(seed), count)
    except ConfigError:
        reject()
    assert len(lengths) == count
    assert all(type(length) is int and low <= length <= high for length in lengths)
    assert distribution.sample(np.random.default_rng(seed), count) == lengths


def test_spaces_in_a_text_are_ignored() -> None:
    assert parse_lengths(" uniform: 32..512 ") == parse_lengths("uniform:32..512")
    assert str(parse_lengths("exp: 96, 8..384")) == "exp:96,8..384"


def test_fixed_and_uniform_lengths() -> None:
    assert draw("fixed:7", 3) == [7, 7, 7]
    lengths = draw("uniform:3..6")
    assert set(lengths) == {3, 4, 5, 6}
    assert np.mean(lengths) == pytest.approx(4.5, abs=0.05)


def test_lognormal_has_its_median_and_sigma() -> None:
    lengths = draw("lognormal:1000,0.5")
    assert np.median(lengths) == pytest.approx(1000, rel=0.02)
    assert np.std(np.log(lengths)) == pytest.approx(0.5, rel=0.02)


def test_exponential_is_clipped_to_the_bounds() -> None:
    lengths = draw("exp:96,8..384")
    expected = 8 + 96 * (math.exp(-8 / 96) - math.exp(-384 / 96))
    assert np.mean(lengths) == pytest.approx(expected, rel=0.02)
    assert lengths.count(384) == pytest.approx(MANY * math.exp(-384 / 96), rel=0.1)


def test_exponential_is_drawn_again_with_reject() -> None:
    lengths = draw("exp:128,1..32,reject")
    expected = stats.truncexpon(b=32 / 128, loc=0.5, scale=128).mean()
    assert np.mean(lengths) == pytest.approx(expected, rel=0.02)
    assert lengths.count(32) < MANY / 16


def test_unreachable_range_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"0 of 100000 draws fell into 100000\.\.100001.*omit `reject`"):
        draw("exp:2,100000..100001,reject", 1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("normal:96", r"unknown distribution 'normal'; use one of fixed:LENGTH, uniform"),
        ("", r"unknown distribution ''"),
        ("fixed", r"write fixed:LENGTH"),
        ("fixed:1.5", r"write fixed:LENGTH"),
        ("fixed:0", r"fixed: length must be in 1\.\.1073741824, got 0"),
        ("uniform:32", r"write uniform:LOW\.\.HIGH"),
        ("uniform:9..8", r"1 <= low <= high <= 1073741824, got 9\.\.8"),
        ("uniform:0..8", r"1 <= low <= high <= 1073741824, got 0\.\.8"),
        ("lognormal:96", r"write lognormal:MEDIAN,SIGMA"),
        ("lognormal:96,11", r"sigma must be in 0\.\.10, got 11"),
        ("lognormal:96,-1", r"write lognormal:MEDIAN,SIGMA"),
        ("quantiles:9,8,10", r"the quantiles must ascend"),
        ("exp:nan", r"write exp:MEAN"),
        ("exp:0.5", r"mean must be in .*, got 0.5"),
        ("exp:x,1..2", r"write exp:MEAN"),
        ("exp:96,8..384,redraw", r"write exp:MEAN"),
        ("exp:96,8..", r"write exp:MEAN"),
    ],
)
def test_invalid_text_is_rejected_with_the_syntax(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_lengths(text)


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


def draw_anyscale(text: str, count: int) -> list[int]:
    return parse_lengths(text).sample(np.random.default_rng(0), count)


def test_anyscale_distribution_returns_the_published_lengths() -> None:
    published = [request.output_len for request in anyscale_workload(1536)]
    assert draw_anyscale("anyscale:1536", 1000) == published
    assert draw_anyscale("anyscale:1536/4", 128) == [math.ceil(length / 4) for length in published[:128]]
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
        draw_anyscale("anyscale:32", 1001)
