"""Length distributions: bounds, moments, and their text."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from scipy import stats

from chairlift.errors import ConfigError
from chairlift.lab.workload.lengths import parse_lengths

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
