"""Distributions of prompt and output lengths, and the text format of the length options.

fixed:128                    always 128
uniform:32..512              uniform over 32..512, bounds included
lognormal:96,0.7,16..512     median 96, sigma 0.7 of the logarithm; values outside 16..512 become the nearer bound
exp:96,8..384                mean 96; values outside 8..384 become the nearer bound
exp:128,1..32,reject         values outside 1..32 are drawn again
quantiles:1730,5696,8192     median 1730, 90th percentile 5696, at most 8192, and uniform between them
hist:sharegpt-input          a bin of the histogram by its count, then uniform in the bin (see `HistogramLengths`)
anyscale:1536/4              a quarter of the published output lengths with the cap 1536 (see `anyscale`)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError
from chairlift.lab.workload.anyscale import AnyscaleLengths

LONGEST: Final = 1 << 30
"""The default upper bound of a distribution."""

MAX_REDRAWS: Final = 100
"""Rounds of rejection sampling before a range is reported as unreachable."""

HISTOGRAMS: Final = ("alpaca-input", "alpaca-output", "sharegpt-input", "sharegpt-output")
"""Lengths of two data sets in the vLLM paper (Kwon et al., SOSP'23), Figure 11; `data/` has the source."""


class LengthDistribution(Protocol):
    """A distribution of lengths in tokens, each at least 1. `str()` returns its text, as `parse_lengths` reads it."""

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return `count` independent lengths.

        Raises:
            ConfigError: lengths outside the range are drawn again, but almost all draws are outside.
        """
        ...


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Rounds real-valued draws to integers within low..high, bounds included.

    Draws outside become the nearer bound or, with `reject`, are drawn again.
    """

    low: int = 1
    high: int = LONGEST
    reject: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= LONGEST:
            raise ConfigError(f"a range of lengths must satisfy 1 <= low <= high, got {self.low}..{self.high}")

    def apply(self, draw: Callable[[int], npt.NDArray[np.float64]], count: int) -> list[int]:
        """Return `count` lengths from `draw(n)`, which returns n independent draws."""
        if not self.reject:
            return _to_ints(np.clip(draw(count), self.low, self.high))
        kept: list[int] = []
        num_draws = max(count, 1000)
        for _ in range(MAX_REDRAWS):
            lengths = np.rint(draw(num_draws))
            kept += _to_ints(lengths[(lengths >= self.low) & (lengths <= self.high)])
            if len(kept) >= count:
                return kept[:count]
        raise ConfigError(
            f"only {len(kept)} of {MAX_REDRAWS * num_draws} draws fell into {self.low}..{self.high}, and {count} are "
            f"needed: widen the range, or omit `reject`, so that draws outside of it become its bounds"
        )

    def suffix(self) -> str:
        """The range as the last part of a distribution's text, such as ",8..384"; empty for the default range."""
        text = "" if (self.low, self.high) == (1, LONGEST) else f",{self.low}..{self.high}"
        return text + (",reject" if self.reject else "")


@dataclass(frozen=True, slots=True)
class FixedLength:
    """A constant length."""

    syntax: ClassVar[str] = "fixed:LENGTH"
    length: int

    def __post_init__(self) -> None:
        _check_range("fixed: length", self.length, 1, LONGEST)

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        return [self.length] * count

    def __str__(self) -> str:
        return f"fixed:{self.length}"


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """The uniform distribution over low..high, bounds included."""

    syntax: ClassVar[str] = "uniform:LOW..HIGH"
    low: int
    high: int

    def __post_init__(self) -> None:
        LengthRange(self.low, self.high)

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        lengths: list[int] = rng.integers(self.low, self.high, size=count, endpoint=True).tolist()
        return lengths

    def __str__(self) -> str:
        return f"uniform:{self.low}..{self.high}"


@dataclass(frozen=True, slots=True)
class LogNormalLengths:
    """The log-normal distribution: the logarithm has mean ln(median) and standard deviation sigma."""

    syntax: ClassVar[str] = "lognormal:MEDIAN,SIGMA[,LOW..HIGH][,reject]"
    median: float
    sigma: float
    within: LengthRange = LengthRange()

    def __post_init__(self) -> None:
        _check_range("lognormal: median", self.median, 1, LONGEST)
        _check_range("lognormal: sigma", self.sigma, 0, 10)

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        return self.within.apply(lambda n: rng.lognormal(np.log(self.median), self.sigma, n), count)

    def __str__(self) -> str:
        return f"lognormal:{self.median:.12g},{self.sigma:.12g}{self.within.suffix()}"


@dataclass(frozen=True, slots=True)
class ExponentialLengths:
    """The exponential distribution; `mean` is the mean before the range is applied."""

    syntax: ClassVar[str] = "exp:MEAN[,LOW..HIGH][,reject]"
    mean: float
    within: LengthRange = LengthRange()

    def __post_init__(self) -> None:
        _check_range("exp: mean", self.mean, 1, LONGEST)

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        return self.within.apply(lambda n: rng.exponential(self.mean, n), count)

    def __str__(self) -> str:
        return f"exp:{self.mean:.12g}{self.within.suffix()}"


@dataclass(frozen=True, slots=True)
class QuantileLengths:
    """A distribution with known median, 90th percentile and maximum, which is uniform between them."""

    syntax: ClassVar[str] = "quantiles:MEDIAN,P90,LONGEST"
    median: int
    p90: int
    longest: int

    def __post_init__(self) -> None:
        if not 1 <= self.median <= self.p90 <= self.longest <= LONGEST:
            raise ConfigError("the quantiles must ascend from 1")

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        lengths = np.interp(rng.random(count), [0.0, 0.5, 0.9, 1.0], [1, self.median, self.p90, self.longest])
        return [round(length) for length in lengths.tolist()]

    def __str__(self) -> str:
        return f"quantiles:{self.median},{self.p90},{self.longest}"


@dataclass(frozen=True, slots=True)
class HistogramLengths:
    """A bin is drawn with a probability proportional to its count, then a length uniformly within the bin.

    Attributes:
        name: one of HISTOGRAMS.
        start, end: the lower bound of the first bin and the upper bound of the last; all bins are equally wide.
    """

    syntax: ClassVar[str] = "hist:NAME[,LOW..HIGH][,reject]"
    name: str
    start: float
    end: float
    counts: tuple[int, ...]
    within: LengthRange = LengthRange()

    @classmethod
    def load(cls, name: str, within: LengthRange = LengthRange()) -> HistogramLengths:
        """Read a published histogram.

        Raises:
            ConfigError: the name is unknown.
        """
        if name not in HISTOGRAMS:
            raise ConfigError(f"a histogram must be one of {', '.join(HISTOGRAMS)}, got {name!r}")
        base, _, side = name.partition("-")
        text = files("chairlift.lab.workload").joinpath("data", f"{base}.json").read_text(encoding="utf-8")
        fields = json.loads(text)[side]
        return cls(name, float(fields["lo"]), float(fields["hi"]), tuple(fields["counts"]), within)

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        chances = np.array(self.counts) / sum(self.counts)
        width = (self.end - self.start) / len(self.counts)
        return self.within.apply(
            lambda n: self.start + width * (rng.choice(len(chances), size=n, p=chances) + rng.random(n)), count
        )

    def __str__(self) -> str:
        return f"hist:{self.name}{self.within.suffix()}"


_NUMBER: Final = r"(\d+(?:\.\d+)?)"
_RANGE: Final = r"(?:,(\d+)\.\.(\d+))?(,reject)?"
_CLASSES: Final[dict[Callable[..., LengthDistribution], str]] = {
    FixedLength: r"fixed:(\d+)",
    UniformLengths: r"uniform:(\d+)\.\.(\d+)",
    LogNormalLengths: rf"lognormal:{_NUMBER},{_NUMBER}{_RANGE}",
    ExponentialLengths: rf"exp:{_NUMBER}{_RANGE}",
    QuantileLengths: r"quantiles:(\d+),(\d+),(\d+)",
    HistogramLengths: rf"hist:([^,]+){_RANGE}",
    AnyscaleLengths: r"anyscale:(\d+)(?:/(\d+))?",
}
"""The class of each distribution, and the pattern of its text."""

SYNTAX: Final[dict[str, str]] = {
    pattern.partition(":")[0]: each.syntax  # type: ignore[attr-defined]
    for each, pattern in _CLASSES.items()
}
"""The name of each distribution, and its syntax."""


@cache
def parse_lengths(text: str) -> LengthDistribution:
    """Parse the text of a distribution, in the format that the module's docstring describes.

    Raises:
        ConfigError: the distribution is unknown, or its arguments are wrong.
    """
    kind = text.strip().partition(":")[0]
    if kind not in SYNTAX:
        raise ConfigError(f"lengths {text!r}: unknown distribution {kind!r}; use one of {', '.join(SYNTAX.values())}")
    distribution, pattern = next((each, rest) for each, rest in _CLASSES.items() if rest.startswith(f"{kind}:"))
    found = re.fullmatch(pattern, re.sub(r"\s", "", text))
    if found is None:
        raise ConfigError(f"lengths {text!r}: write {SYNTAX[kind]}")
    try:
        return _build(distribution, pattern, found.groups())
    except ConfigError as error:
        raise ConfigError(f"lengths {text!r}: {error}; write {SYNTAX[kind]}") from None


def _build(
    distribution: Callable[..., LengthDistribution], pattern: str, groups: tuple[str | None, ...]
) -> LengthDistribution:
    """Create a distribution from the groups of its pattern."""
    if pattern.endswith(_RANGE):
        *own, low, high, reject = groups
        within = LengthRange(int(low or 1), int(high or LONGEST), reject is not None)
        if distribution is HistogramLengths:
            return HistogramLengths.load(str(own[0]), within)
        return distribution(*(float(value or 0) for value in own), within)
    return distribution(*(int(value) for value in groups if value is not None))


def paired_lengths(
    prompt: LengthDistribution, output: LengthDistribution, max_total: int, rng: np.random.Generator, count: int
) -> list[tuple[int, int]]:
    """Return `count` pairs of an independent prompt length and output length whose sum is at most `max_total`.

    Pairs with a larger sum are drawn again, as in the vLLM paper (Kwon et al., SOSP'23, section 6.1).

    Raises:
        ConfigError: as LengthDistribution.sample, or the sum of almost all pairs exceeds max_total.
    """
    pairs: list[tuple[int, int]] = []
    num_draws = max(count, 1000)
    for _ in range(MAX_REDRAWS):
        drawn = zip(prompt.sample(rng, num_draws), output.sample(rng, num_draws), strict=True)
        pairs += [pair for pair in drawn if sum(pair) <= max_total]
        if len(pairs) >= count:
            return pairs[:count]
    raise ConfigError(
        f"only {len(pairs)} of {MAX_REDRAWS * num_draws} pairs of {prompt} prompt and {output} output tokens fit "
        f"into {max_total} tokens, and {count} are needed: shorten the lengths or increase max_model_len"
    )


def _to_ints(values: npt.NDArray[np.float64]) -> list[int]:
    return [round(value) for value in values.tolist()]


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be in {low:.12g}..{high:.12g}, got {value:.12g}")
