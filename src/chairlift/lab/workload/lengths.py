"""Distributions of prompt and output lengths, and the text format of the length options.

fixed:128                    always 128
uniform:32..512              uniform over 32..512, bounds included
lognormal:96,0.7,16..512     median 96, sigma 0.7 of the logarithm; values outside 16..512 become the nearer bound
exp:96,8..384                mean 96; values outside 8..384 become the nearer bound
exp:128,1..32,reject         values outside 1..32 are drawn again
quantiles:1730,5696,8192     median 1730, 90th percentile 5696, at most 8192, and uniform between them
hist:sharegpt-input          a bin of the histogram by its count, then uniform in the bin (see `histogram_draw`)
anyscale:1536/4              a quarter of the published output lengths with the cap 1536 (see `anyscale`)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError
from chairlift.lab.workload.anyscale import published_output_lens

LONGEST: Final = 1 << 30
"""The default upper bound of a distribution."""

Drawn = TypeVar("Drawn")

MAX_REDRAWS: Final = 100
"""Rounds of rejection sampling before a range is reported as unreachable."""

HISTOGRAMS: Final = ("alpaca-input", "alpaca-output", "sharegpt-input", "sharegpt-output")
"""Lengths of two data sets in the vLLM paper (Kwon et al., SOSP'23), Figure 11; `data/` has the source."""

Draw = Callable[[np.random.Generator, int], npt.NDArray[Any]]
"""Returns a number of independent draws, which need not be integers."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution of lengths in tokens: real-valued draws, rounded to integers within low..high, bounds included.

    Draws outside become the nearer bound or, with `reject`, are drawn again.

    Attributes:
        text: as `parse_lengths` reads it, without spaces.
    """

    text: str
    draw: Draw = field(compare=False, repr=False)
    low: int = 1
    high: int = LONGEST
    reject: bool = False

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return `count` lengths.

        Raises:
            ConfigError: lengths outside the range are drawn again, but almost all draws are outside.
        """
        if not self.reject:
            return _to_ints(np.clip(self.draw(rng, count), self.low, self.high))

        def kept(num_draws: int) -> list[int]:
            lengths = np.rint(self.draw(rng, num_draws))
            return _to_ints(lengths[(lengths >= self.low) & (lengths <= self.high)])

        advice = "widen the range, or omit `reject`, so that draws outside of it become its bounds"
        return _draw_again(kept, count, f"draws fell into {self.low}..{self.high}", advice)

    def __str__(self) -> str:
        return self.text


def _fixed(length: int) -> Draw:
    _check_range("fixed: length", length, 1, LONGEST)
    return lambda rng, count: np.full(count, length)


def _uniform(low: int, high: int) -> Draw:
    """Uniform over low..high, bounds included."""
    _check_bounds(low, high)
    return lambda rng, count: rng.integers(low, high, size=count, endpoint=True)


def _lognormal(median: float, sigma: float) -> Draw:
    """The logarithm has mean ln(median) and standard deviation sigma."""
    _check_range("lognormal: median", median, 1, LONGEST)
    _check_range("lognormal: sigma", sigma, 0, 10)
    return lambda rng, count: rng.lognormal(np.log(median), sigma, count)


def _exponential(mean: float) -> Draw:
    """`mean` is the mean before the range is applied."""
    _check_range("exp: mean", mean, 1, LONGEST)
    return lambda rng, count: rng.exponential(mean, count)


def _quantiles(median: int, p90: int, longest: int) -> Draw:
    """Uniform between 1, the median, the 90th percentile and the maximum."""
    if not 1 <= median <= p90 <= longest <= LONGEST:
        raise ConfigError("the quantiles must ascend from 1")
    return lambda rng, count: np.interp(rng.random(count), [0.0, 0.5, 0.9, 1.0], [1, median, p90, longest])


def _published_histogram(name: str) -> Draw:
    """The published histogram with this name, one of HISTOGRAMS."""
    if name not in HISTOGRAMS:
        raise ConfigError(f"a histogram must be one of {', '.join(HISTOGRAMS)}, got {name!r}")
    base, _, side = name.partition("-")
    text = files("chairlift.lab.workload").joinpath("data", f"{base}.json").read_text(encoding="utf-8")
    fields = json.loads(text)[side]
    return histogram_draw(float(fields["lo"]), float(fields["hi"]), fields["counts"])


def histogram_draw(start: float, end: float, counts: list[int]) -> Draw:
    """Draw a bin with a probability proportional to its count, then a length uniformly within the bin.

    Args:
        start, end: the lower bound of the first bin and the upper bound of the last; all bins are equally wide.
    """
    chances, width = np.array(counts) / sum(counts), (end - start) / len(counts)
    return lambda rng, count: start + width * (rng.choice(len(chances), size=count, p=chances) + rng.random(count))


def _anyscale(cap: int, divisor: int = 1) -> Draw:
    """The output lengths of the throughput figure in their published order.

    Args:
        divisor: divides each length, rounded up, for machines and models that are smaller.
    """
    for name, value in (("CAP", cap), ("DIVISOR", divisor)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    return lambda rng, count: np.ceil(np.array(published_output_lens(cap, count)) / divisor)


class _Kind(NamedTuple):
    """How a distribution is written and made. `convert` is applied to each group of the pattern."""

    syntax: str
    pattern: str
    convert: Callable[[str], Any]
    make: Callable[..., Draw]


_NUMBER: Final = r"(\d+(?:\.\d+)?)"
_RANGE_SYNTAX: Final = "[,LOW..HIGH][,reject]"
_RANGE: Final = r"(?:,(\d+)\.\.(\d+))?(,reject)?"
_NO_RANGE: Final = "()()()"

_KINDS: Final = {
    "fixed": _Kind("LENGTH", r"(\d+)", int, _fixed),
    "uniform": _Kind("LOW..HIGH", r"(\d+)\.\.(\d+)", int, _uniform),
    "lognormal": _Kind(f"MEDIAN,SIGMA{_RANGE_SYNTAX}", rf"{_NUMBER},{_NUMBER}", float, _lognormal),
    "exp": _Kind(f"MEAN{_RANGE_SYNTAX}", _NUMBER, float, _exponential),
    "quantiles": _Kind("MEDIAN,P90,LONGEST", r"(\d+),(\d+),(\d+)", int, _quantiles),
    "hist": _Kind(f"NAME{_RANGE_SYNTAX}", "([^,]+)", str, _published_histogram),
    "anyscale": _Kind("CAP[/DIVISOR]", r"(\d+)(?:/(\d+))?", int, _anyscale),
}
_SYNTAX: Final = {name: f"{name}:{kind.syntax}" for name, kind in _KINDS.items()}


@cache
def parse_lengths(text: str) -> LengthDistribution:
    """Parse the text of a distribution, in the format that the module's docstring describes.

    Raises:
        ConfigError: the distribution is unknown, or its arguments are wrong.
    """
    compact = re.sub(r"\s", "", text)
    name, _, arguments = compact.partition(":")
    if name not in _KINDS:
        raise ConfigError(f"lengths {text!r}: unknown distribution {name!r}; use one of {', '.join(_SYNTAX.values())}")
    kind = _KINDS[name]
    found = re.fullmatch(kind.pattern + (_RANGE if kind.syntax.endswith(_RANGE_SYNTAX) else _NO_RANGE), arguments)
    if found is None:
        raise ConfigError(f"lengths {text!r}: write {_SYNTAX[name]}")
    *own, low, high, reject = found.groups()
    try:
        bounds = int(low or 1), int(high or LONGEST)
        _check_bounds(*bounds)
        return LengthDistribution(
            compact, kind.make(*(kind.convert(each) for each in own if each)), *bounds, bool(reject)
        )
    except ConfigError as error:
        raise ConfigError(f"lengths {text!r}: {error}; write {_SYNTAX[name]}") from None


def paired_lengths(
    prompt: LengthDistribution, output: LengthDistribution, max_total: int, rng: np.random.Generator, count: int
) -> list[tuple[int, int]]:
    """Return `count` pairs of an independent prompt length and output length whose sum is at most `max_total`.

    Pairs with a larger sum are drawn again, as in the vLLM paper (Kwon et al., SOSP'23, section 6.1).

    Raises:
        ConfigError: as LengthDistribution.sample, or the sum of almost all pairs exceeds max_total.
    """

    def fitting(num_draws: int) -> list[tuple[int, int]]:
        drawn = zip(prompt.sample(rng, num_draws), output.sample(rng, num_draws), strict=True)
        return [pair for pair in drawn if sum(pair) <= max_total]

    what = f"pairs of {prompt} prompt and {output} output tokens fit into {max_total} tokens"
    return _draw_again(fitting, count, what, "shorten the lengths or increase max_model_len")


def _draw_again(draw: Callable[[int], list[Drawn]], count: int, what: str, advice: str) -> list[Drawn]:
    """Return `count` of the values that `draw(n)` keeps of n draws, in at most MAX_REDRAWS rounds."""
    kept: list[Drawn] = []
    num_draws = max(count, 1000)
    for _ in range(MAX_REDRAWS):
        kept += draw(num_draws)
        if len(kept) >= count:
            return kept[:count]
    raise ConfigError(f"only {len(kept)} of {MAX_REDRAWS * num_draws} {what}, and {count} are needed: {advice}")


def _to_ints(values: npt.NDArray[Any]) -> list[int]:
    return [round(value) for value in values.tolist()]


def _check_bounds(low: int, high: int) -> None:
    if not 1 <= low <= high <= LONGEST:
        raise ConfigError(f"a range of lengths must satisfy 1 <= low <= high <= {LONGEST}, got {low}..{high}")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be in {low:.12g}..{high:.12g}, got {value:.12g}")
