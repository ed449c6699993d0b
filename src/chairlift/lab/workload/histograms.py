"""Histograms of lengths in files: two that were published, and the user's own.

A file is a JSON object: {"source": where it is from, "input": SIDE, "output": SIDE}, and a side is {"lo": 1.0, "hi":
2028.0, "bins": 128, "counts": [128 integers]}: bins of equal width from lo to hi.
"""

from __future__ import annotations

import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from chairlift.errors import ConfigError

PUBLISHED: Final = ("alpaca", "sharegpt")
"""Prompt and output lengths of the two data sets of the vLLM paper (Kwon et al., SOSP'23), Figure 11; how they were
read is in `data/`."""

SIDES: Final = ("input", "output")


def load_histogram(name: str) -> tuple[float, float, tuple[int, ...]]:
    """Where the first bin begins, where the last one ends, and the counts.

    Args:
        name: one of PUBLISHED, or the path of a file, then -input or -output: "sharegpt-input", "own.json-output".

    Raises:
        ConfigError: there is no such file, or it is not a histogram: says which field.
    """
    base, _, side = name.rpartition("-")
    if side not in SIDES or not base:
        raise ConfigError(f"a histogram is NAME-input or NAME-output, got {name!r}; {_known()}")
    text = _read(base)
    try:
        fields = json.loads(text)[side]
        low, high, counts = float(fields["lo"]), float(fields["hi"]), tuple(fields["counts"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"histogram {base}: not an object whose {side!r} holds lo, hi, bins and counts ({error!r})"
        ) from None
    _check(base, side, low, high, counts, fields.get("bins", len(counts)))
    return low, high, counts


def _read(base: str) -> str:
    if base in PUBLISHED:
        return files("chairlift.lab.workload").joinpath("data", f"{base}.json").read_text(encoding="utf-8")
    try:
        return Path(base).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"histogram {base}: cannot be read ({error}); {_known()}") from None


def _check(base: str, side: str, low: float, high: float, counts: tuple[Any, ...], bins: Any) -> None:
    if not (math.isfinite(low) and math.isfinite(high) and 0 <= low < high):
        raise ConfigError(f"histogram {base}: {side}.lo and hi must satisfy 0 <= lo < hi, got {low:g} and {high:g}")
    if bad := [count for count in counts if type(count) is not int or count < 0]:
        raise ConfigError(f"histogram {base}: {side}.counts must be integers >= 0, got {bad[0]!r}")
    if not sum(counts):
        raise ConfigError(f"histogram {base}: {side}.counts must not all be 0")
    if bins != len(counts):
        raise ConfigError(f"histogram {base}: {side}.bins is {bins}, but there are {len(counts)} counts")


def _known() -> str:
    return f"known by name are {' and '.join(PUBLISHED)}, anything else is the path of a JSON file"
