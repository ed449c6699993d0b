"""Published results as simulations: one module for each preset, which is imported when it is used.

Each module has a `PRESET`. Published numbers are data with their source, and simulated ones are computed by `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Final

from chairlift.errors import ConfigError

PRESET_NAMES: Final = (
    "anyscale",
    "orca",
    "sarathi",
    "vllm-fig2",
    "vllm-fig3",
    "vllm-fig12",
    "vllm-fig13",
    "vllm-fig15",
    "vllm-fig16",
    "vllm-fig18b",
)


@dataclass(frozen=True, slots=True)
class PresetOptions:
    """The options of a preset; None selects the preset's value.

    Attributes:
        workload_seed: the seed of lengths, tokens and arrivals.
        num_prompts: number of requests in each run.
    """

    workload_seed: int | None = None
    num_prompts: int | None = None

    def __post_init__(self) -> None:
        for name, low in (("workload_seed", 0), ("num_prompts", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} must be at least {low}, got {value}")


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text; column names say whether a number is published or simulated ("ours")."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.title


@dataclass(frozen=True, slots=True)
class PresetResult:
    """The result of a preset.

    Attributes:
        constants: (name, value) of everything that was chosen, the cost model included.
        tables: published and simulated numbers.
        notes: the differences between them, with their reasons.
        published, ours: the numbers of the tables, ready for JSON.
    """

    constants: list[tuple[str, str]]
    tables: list[Table]
    notes: list[str]
    published: dict[str, Any]
    ours: dict[str, Any]

    def to_dict(self, preset: str) -> dict[str, Any]:
        return {"preset": preset, "published": self.published, "ours": self.ours}


@dataclass(frozen=True, slots=True)
class Preset:
    """A published table or figure, and the function that simulates it.

    Attributes:
        source: paper, section, table or figure.
        options: the fields of PresetOptions that `run` supports; any other one is an error.
    """

    name: str
    title: str
    source: str
    run: Callable[[PresetOptions], PresetResult]
    options: tuple[str, ...] = ("num_prompts", "workload_seed")


def load_preset(name: str) -> Preset:
    """Returns a preset by name; raises ConfigError if it is unknown."""
    if name not in PRESET_NAMES:
        raise ConfigError(f"preset {name!r} is unknown; use one of {', '.join(PRESET_NAMES)}")
    preset = import_module(f"{__name__}.{name.replace('-', '_')}").PRESET
    assert isinstance(preset, Preset)
    assert preset.name == name
    return preset


def run_preset(preset: Preset, options: PresetOptions) -> PresetResult:
    """Runs a preset; raises ConfigError for an option that it does not support."""
    for option in fields(options):
        value = getattr(options, option.name)
        if value is not None and option.name not in preset.options:
            supported = ", ".join(preset.options) or "none"
            raise ConfigError(
                f"preset {preset.name}: {option.name}={value} does not apply; its options are: {supported}"
            )
    return preset.run(options)


def format_number(value: float | None, digits: int, unit: str = "") -> str:
    """Formats the cell of a table; None is a dash."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"
