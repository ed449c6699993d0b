"""Published results as simulations: one module for each preset, which is imported when it is run.

Published numbers are data with their source, and simulated ones are computed by the `run` of each module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Final, TextIO

from rich.console import RenderableType
from rich.text import Text

from chairlift.errors import ConfigError
from chairlift.lab.tables import constants_table, make_text_table, print_parts, print_report


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
    notes: Sequence[str]
    published: dict[str, Any]
    ours: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Preset:
    """A published table or figure, which the function `run` of the module with its name simulates.

    Attributes:
        source: paper, section, table or figure.
        options: the fields of PresetOptions that it supports; any other one is an error.
    """

    name: str
    title: str
    source: str
    options: tuple[str, ...] = ("num_prompts", "workload_seed")

    def run(self, options: PresetOptions) -> PresetResult:
        """Simulates the preset; raises ConfigError for an option that it does not support."""
        for option in fields(options):
            value = getattr(options, option.name)
            if value is not None and option.name not in self.options:
                supported = ", ".join(self.options) or "none"
                raise ConfigError(
                    f"preset {self.name}: {option.name}={value} does not apply; its options are: {supported}"
                )
        result = import_module(f"{__name__}.{self.name.replace('-', '_')}").run(options)
        assert isinstance(result, PresetResult)
        return result


_ANYSCALE: Final = 'Daniel et al., "How continuous batching enables 23x throughput in LLM inference", Anyscale, 2023'
_VLLM: Final = "Kwon et al., SOSP'23"
_PRESETS: Final = (
    Preset("anyscale", "Continuous batching against static: 23 times the throughput", _ANYSCALE, ("num_prompts",)),
    Preset("orca", "Iteration-level scheduling on GPT-3 175B", "Yu et al., OSDI'22, section 6.2, Figure 10b"),
    Preset(
        "sarathi",
        "Chunked prefills against whole prompts",
        "Agrawal et al., OSDI'24, Tables 2 to 4 and Figure 10",
    ),
    Preset("vllm-fig2", "Use of the KV memory, OPT-13B, ShareGPT", f"{_VLLM}, Figure 2"),
    Preset("vllm-fig3", "Slots reserved and never used by two requests", f"{_VLLM}, Figure 3", ()),
    Preset(
        "vllm-fig12",
        "Normalized latency by request rate, OPT-13B",
        f"{_VLLM}, Figure 12a and 12d, sections 6.2 and 6.3",
    ),
    Preset("vllm-fig13", "Number of running requests, OPT-13B", f"{_VLLM}, Figure 13"),
    Preset("vllm-fig15", "KV memory saved by parallel sampling, OPT-13B", f"{_VLLM}, Figure 15 and section 6.3"),
    Preset(
        "vllm-fig16",
        "Throughput of translations with a shared prefix, LLaMA-13B",
        f"{_VLLM}, Figure 16 and section 6.4",
    ),
    Preset("vllm-fig18b", "Latency by block size, OPT-13B", f"{_VLLM}, Figure 18b"),
)
PRESETS: Final = {preset.name: preset for preset in _PRESETS}


def find_preset(name: str) -> Preset:
    """Returns a preset by name; raises ConfigError if it is unknown."""
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is unknown; use one of {', '.join(PRESETS)}")
    return PRESETS[name]


def print_presets(presets: Iterable[Preset], file: TextIO | None = None) -> None:
    """Prints the name, title and source of each preset."""
    rows = [[preset.name, preset.title, preset.source] for preset in presets]
    print_parts([make_text_table("Presets", ["name", "title", "source"], rows, justify="left")], file)


def print_preset(preset: Preset, result: PresetResult, file: TextIO | None = None, as_json: bool = False) -> None:
    """Prints the constants, the tables and the notes, or one line of JSON."""
    parts: list[RenderableType] = [
        Text(f"{preset.title} ({preset.source})", style="bold"),
        constants_table(result.constants),
        *(make_text_table(table.title, table.columns, table.rows) for table in result.tables),
        *(f"- {note}" for note in result.notes),
    ]
    print_report(parts, {"preset": preset.name, "published": result.published, "ours": result.ours}, file, as_json)


def format_number(value: float | None, digits: int, unit: str = "") -> str:
    """Formats the cell of a table; None is a dash."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"
