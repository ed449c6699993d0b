"""Distributions of prompt and output lengths, and the text format of the length options.

fixed:128                    always 128
uniform:32..512              uniform over 32..512, bounds included
lognormal:96,0.7,16..512     median 96, sigma 0.7 of the logarithm; values outside 16..512 become the nearer bound
exp:96,8..384                mean 96; values outside 8..384 become the nearer bound
exp:128,1..32,reject         values outside 1..32 are drawn again
hist:sharegpt-input          a bin of the histogram by its count, then uniform in the bin (see `HistogramLengths`)
anyscale:1536/4              a quarter of the published output lengths with the cap 1536 (see `anyscale`)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError
from chairlift.lab.workload.anyscale import AnyscaleLengths

LONGEST: Final = 1 << 30
"""The default upper bound of a distribution."""

MAX_REDRAWS: Final = 100
"""Rounds of rejection sampling before a range is reported as unreachable."""


PUBLISHED_HISTOGRAMS: Final = ("alpaca", "sharegpt")
"""Prompt and output lengths of the data sets of the vLLM paper (Kwon et al., SOSP'23), Figure 11; `data/` describes how
they were read."""

HISTOGRAM_SIDES: Final = ("input", "output")


class LengthDistribution(Protocol):
    """A distribution of lengths in tokens, each at least 1. `str()` returns its text, as `parse_lengths` reads it."""

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        """Returns `count` independent lengths.

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
        """Returns `count` lengths from `draw(n)`, which returns n independent draws."""
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
        if (self.low, self.high) == (1, LONGEST):
            return ",reject" if self.reject else ""
        return f",{self.low}..{self.high}" + (",reject" if self.reject else "")


@dataclass(frozen=True, slots=True)
class FixedLength:
    """A constant length."""

    syntax: ClassVar[str] = "fixed:LENGTH"
    length: int

    def __post_init__(self) -> None:
        _in_range("fixed: length", self.length, 1, LONGEST)

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
        _in_range("lognormal: median", self.median, 1, LONGEST)
        _in_range("lognormal: sigma", self.sigma, 0, 10)

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
        _in_range("exp: mean", self.mean, 1, LONGEST)

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        return self.within.apply(lambda n: rng.exponential(self.mean, n), count)

    def __str__(self) -> str:
        return f"exp:{self.mean:.12g}{self.within.suffix()}"


@dataclass(frozen=True, slots=True)
class HistogramLengths:
    """A bin is drawn with a probability proportional to its count, then a length uniformly within the bin.

    Attributes:
        name: as for `load`.
        start, end: the lower bound of the first bin and the upper bound of the last; all bins are equally wide.
    """

    syntax: ClassVar[str] = "hist:NAME-input|NAME-output[,LOW..HIGH][,reject]"
    name: str
    start: float
    end: float
    counts: tuple[int, ...]
    within: LengthRange = LengthRange()

    @classmethod
    def load(cls, name: str, within: LengthRange = LengthRange()) -> HistogramLengths:
        """Reads a histogram.

        A file is a JSON object {"source": TEXT, "input": SIDE, "output": SIDE}; a side is {"lo": 1.0, "hi": 2028.0,
        "bins": 128, "counts": [128 integers]} with bins of equal width from lo to hi.

        Args:
            name: one of PUBLISHED_HISTOGRAMS or the path of a file, followed by -input or -output.

        Raises:
            ConfigError: there is no such file, or a field is missing or wrong.
        """
        base, _, side = name.rpartition("-")
        if side not in HISTOGRAM_SIDES or not base:
            raise ConfigError(f"a histogram must be NAME-input or NAME-output, got {name!r}; {_known_histograms()}")
        text = _read_histogram(base)
        try:
            fields = json.loads(text)[side]
            low, high, counts = float(fields["lo"]), float(fields["hi"]), tuple(fields["counts"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"histogram {base}: {side!r} must be an object with lo, hi, bins and counts ({error!r})"
            ) from None
        _check_histogram(base, side, low, high, counts, fields.get("bins", len(counts)))
        return cls(name, low, high, counts, within)

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        chances = np.array(self.counts) / sum(self.counts)
        width = (self.end - self.start) / len(self.counts)
        return self.within.apply(
            lambda n: self.start + width * (rng.choice(len(chances), size=n, p=chances) + rng.random(n)), count
        )

    def __str__(self) -> str:
        return f"hist:{self.name}{self.within.suffix()}"


def _read_histogram(base: str) -> str:
    if base in PUBLISHED_HISTOGRAMS:
        return files("chairlift.lab.workload").joinpath("data", f"{base}.json").read_text(encoding="utf-8")
    try:
        return Path(base).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"histogram {base}: cannot be read ({error}); {_known_histograms()}") from None


def _check_histogram(base: str, side: str, low: float, high: float, counts: tuple[Any, ...], bins: Any) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and 0 <= low < high):
        raise ConfigError(f"histogram {base}: {side}.lo and hi must satisfy 0 <= lo < hi, got {low:g} and {high:g}")
    if bad := [count for count in counts if type(count) is not int or count < 0]:
        raise ConfigError(f"histogram {base}: {side}.counts must be integers >= 0, got {bad[0]!r}")
    if not sum(counts):
        raise ConfigError(f"histogram {base}: {side}.counts must not all be 0")
    if bins != len(counts):
        raise ConfigError(f"histogram {base}: {side}.bins is {bins}, but there are {len(counts)} counts")


def _known_histograms() -> str:
    return f"NAME is {' or '.join(PUBLISHED_HISTOGRAMS)}, or the path of a JSON file"


_CLASSES: Final = (
    FixedLength, UniformLengths, LogNormalLengths, ExponentialLengths, HistogramLengths, AnyscaleLengths,
)  # fmt: skip
SYNTAX: Final = {syntax.partition(":")[0]: syntax for syntax in (each.syntax for each in _CLASSES)}
"""The name of each distribution, and its syntax."""


def parse_lengths(text: str) -> LengthDistribution:
    """Parses the text of a distribution, in the format that the module's docstring describes.

    Raises:
        ConfigError: the distribution is unknown, or its arguments are wrong.
    """
    kind, _, rest = text.strip().partition(":")
    if kind not in SYNTAX:
        raise ConfigError(f"lengths {text!r}: unknown distribution {kind!r}; use one of {', '.join(SYNTAX.values())}")
    arguments = _Arguments([part.strip() for part in rest.split(",")] if rest.strip() else [])
    try:
        return _build(kind, arguments)
    except ConfigError as error:
        raise ConfigError(f"lengths {text!r}: {error}; write {SYNTAX[kind]}") from None


def paired_lengths(
    prompt: LengthDistribution, output: LengthDistribution, max_total: int, rng: np.random.Generator, count: int
) -> list[tuple[int, int]]:
    """Returns `count` pairs of an independent prompt length and output length whose sum is at most `max_total`.

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


def _build(kind: str, arguments: _Arguments) -> LengthDistribution:
    distribution: LengthDistribution
    if kind == "fixed":
        distribution = FixedLength(arguments.integer("LENGTH"))
    elif kind == "uniform":
        distribution = UniformLengths(*arguments.bounds())
    elif kind == "lognormal":
        distribution = LogNormalLengths(arguments.number("MEDIAN"), arguments.number("SIGMA"), arguments.length_range())
    elif kind == "exp":
        distribution = ExponentialLengths(arguments.number("MEAN"), arguments.length_range())
    elif kind == "anyscale":
        distribution = AnyscaleLengths(*arguments.ratio("CAP", "DIVISOR"))
    else:
        distribution = HistogramLengths.load(arguments.text("NAME"), arguments.length_range())
    arguments.finish()
    return distribution


class _Arguments:
    """The comma-separated arguments of one text, read from the left; all methods raise ConfigError."""

    def __init__(self, parts: list[str]) -> None:
        self._parts = parts

    def text(self, name: str) -> str:
        if not self._parts:
            raise ConfigError(f"{name} is missing")
        return self._parts.pop(0)

    def number(self, name: str) -> float:
        part = self.text(name)
        try:
            return float(part)
        except ValueError:
            raise ConfigError(f"{name} must be a number, got {part!r}") from None

    def integer(self, name: str) -> int:
        return self._to_int(name, self.text(name))

    def bounds(self) -> tuple[int, int]:
        part = self.text("LOW..HIGH")
        low, dots, high = part.partition("..")
        if not dots:
            raise ConfigError(f"LOW..HIGH must be two integers with .. between them, got {part!r}")
        return self._to_int("LOW", low), self._to_int("HIGH", high)

    def ratio(self, name: str, divisor: str) -> tuple[int, int]:
        part, slash, rest = self.text(name).partition("/")
        return self._to_int(name, part), self._to_int(divisor, rest) if slash else 1

    def length_range(self) -> LengthRange:
        low, high = self.bounds() if self._parts and ".." in self._parts[0] else (1, LONGEST)
        reject = self._parts[:1] == ["reject"]
        if reject:
            del self._parts[0]
        return LengthRange(low, high, reject)

    def finish(self) -> None:
        if self._parts:
            raise ConfigError(f"{self._parts[0]!r} is one argument too many")

    def _to_int(self, name: str, part: str) -> int:
        try:
            return int(part)
        except ValueError:
            raise ConfigError(f"{name} must be an integer, got {part!r}") from None


def _to_ints(values: npt.NDArray[np.float64]) -> list[int]:
    return [round(value) for value in values.tolist()]


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be in {low:.12g}..{high:.12g}, got {value:.12g}")
