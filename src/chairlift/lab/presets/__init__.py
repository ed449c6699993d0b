"""Published results, simulated again: one module a preset, imported when it is asked for.

A preset's module has a `PRESET`. What was published is data with its source; what is ours is computed in `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any, Final

from chairlift.errors import ConfigError

MODULES: Final = {
    "anyscale": "anyscale",
    "orca": "orca",
    "sarathi": "sarathi",
    "vllm-fig2": "vllm_fig2",
    "vllm-fig3": "vllm_fig3",
    "vllm-fig12": "vllm_fig12",
    "vllm-fig13": "vllm_fig13",
    "vllm-fig15": "vllm_fig15",
    "vllm-fig16": "vllm_fig16",
    "vllm-fig18b": "vllm_fig18b",
}
"""Name of a preset -> its module in this package."""


@dataclass(frozen=True, slots=True)
class PresetOptions:
    """What a user may change; None leaves it to the preset.

    Attributes:
        workload_seed: of lengths, tokens and arrivals; num_prompts: requests in each run.
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
    """Text in columns; the first is on the left, the others on the right. A published number and ours stand side by
    side, and their columns say which is which."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.title


@dataclass(frozen=True, slots=True)
class PresetResult:
    """What came out.

    Attributes:
        constants: (name, value) of everything that was chosen, cost model included.
        notes: where ours differs from the published, and why.
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
    """A published table or figure, and how to compute it.

    Attributes:
        source: paper, section, table or figure.
        takes: the options that `run` heeds; giving another one is an error.
    """

    name: str
    title: str
    source: str
    run: Callable[[PresetOptions], PresetResult]
    takes: frozenset[str] = field(default_factory=frozenset)


def load_preset(name: str) -> Preset:
    """The preset of that name; raises ConfigError naming those that there are."""
    if name not in MODULES:
        raise ConfigError(f"preset {name!r}: there is none; known are {', '.join(MODULES)}")
    preset = import_module(f"{__name__}.{MODULES[name]}").PRESET
    assert isinstance(preset, Preset)
    assert preset.name == name
    return preset


def all_presets() -> list[Preset]:
    return [load_preset(name) for name in MODULES]


def run_preset(preset: Preset, options: PresetOptions) -> PresetResult:
    """Run it; raises ConfigError for an option that the preset does not take."""
    for option in fields(options):
        value = getattr(options, option.name)
        if value is not None and option.name not in preset.takes:
            takes = ", ".join(sorted(preset.takes)) or "none"
            raise ConfigError(f"preset {preset.name}: {option.name}={value} is not for it; it takes {takes}")
    return preset.run(options)
