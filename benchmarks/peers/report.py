"""The report: what ran where, a table a setting, and one JSON line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.figures import Comparison, compare
from benchmarks.peers.stage import Setting
from benchmarks.peers.workload import Load
from rich.console import Console
from rich.table import Table

from chairlift.lab.bench.machine import MachineFacts
from chairlift.lab.tables import number, row_label

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Of a peer on a text.

    Attributes:
        definition: which tokens are predicted from which.
        float32: by the same measure, of the same weights in float32; None: `chairlift bench perplexity`, which has the
            same definition, gives it.
    """

    value: float
    definition: str
    float32: float | None = None


@dataclass(slots=True)
class Measured:
    """A setting of the peer with what was measured of it.

    Attributes:
        rounds: figures of Chairlift and of the peer, by round.
        engines: what the two said about themselves in the last round.
    """

    setting: Setting
    rounds: list[tuple[Figures, Figures]] = field(default_factory=list)
    engines: tuple[dict[str, Any], dict[str, Any]] = field(default_factory=lambda: ({}, {}))


def print_report(
    peer: str, machine: MachineFacts, load: Load, ours: Setting, measured: Sequence[Measured], console: Console
) -> None:
    """Tables, then the JSON line as the last line."""
    memory = f"{machine.memory_bytes / (1 << 30):.0f} GiB"
    console.print(f"{machine.cpu}, {machine.num_cores} cores, {memory}, {', '.join(machine.vector_flags)}")
    console.print(f"seed {load.seed}: {describe(load)}", highlight=False)
    console.print(f"Chairlift: {shlex.join(ours.options['flags'])} without prefix cache", highlight=False)
    for entry in measured:
        console.print(table(peer, entry))
    console.file.write(json.dumps(record(peer, machine, load, ours, measured)) + "\n")


def describe(load: Load) -> str:
    """The workloads in a line."""
    parts = {
        "burst": f"{load.num_prompts} requests at once, prompt {load.input_len}, output {load.output_len}",
        "single": f"{load.single_repeats} single streams of {load.single_input_len} + {load.single_output_len} tokens",
    }
    return "; ".join(parts[name] for name in load.workloads)


def table(peer: str, entry: Measured) -> Table:
    """Median and spread of both, and the ratios."""
    shown = Table(
        title=f"Chairlift and {peer}, {entry.setting.label}",
        caption=_caption(entry),
        title_justify="left",
        caption_justify="left",
    )
    rounds = len(entry.rounds)
    shown.add_column("")
    sides = [column for side in ("Chairlift", peer) for column in (side, *(["min", "max"] if rounds > 1 else []))]
    for column in (*sides, *(f"ratio {i + 1}" for i in range(rounds if rounds > 1 else 0)), "ratio"):
        shown.add_column(column, justify="right")
    for comparison in compare(entry.rounds):
        shown.add_row(*_cells(comparison))
    return shown


def _cells(comparison: Comparison) -> list[str]:
    figure, ratios = comparison.figure, comparison.ratios
    sides = [
        cell
        for side in (comparison.ours, comparison.theirs)
        for cell in _spread([value * figure.scale for value in side])
    ]
    by_round = [f"{ratio:.2f}" for ratio in ratios] if len(ratios) > 1 else []
    return [row_label(figure.label, figure.unit), *sides, *by_round, f"{median(ratios):.2f}"]


def _spread(values: Sequence[float]) -> list[str]:
    """The median and, with several rounds, the minimum and the maximum."""
    statistics = (median, min, max) if len(values) > 1 else (median,)
    return [number(statistic(values)) for statistic in statistics]


def _caption(entry: Measured) -> str:
    variables = "".join(f"{name}={value} " for name, value in entry.setting.variables.items())
    versions = ", ".join(f"{name} {value}" for name, value in entry.engines[1].items())
    flags = " ".join(f"{name}={value}" for name, value in entry.setting.options.items() if name != "command")
    command = shlex.join(entry.setting.options.get("command", []))
    return f"ratio: Chairlift / peer, median of the rounds\n{versions}: {variables}{command}{flags}"


def record(peer: str, machine: MachineFacts, load: Load, ours: Setting, measured: Sequence[Measured]) -> dict[str, Any]:
    """The comparison for JSON, in seconds, bytes and rates."""
    return {
        "benchmark": "peers",
        "peer": peer,
        "machine": machine.to_dict(),
        "workload": load.to_dict(),
        "chairlift": ours.to_dict(),
        "settings": [_setting_record(entry) for entry in measured],
    }


def _setting_record(entry: Measured) -> dict[str, Any]:
    return {
        **entry.setting.to_dict(),
        "engines": {"chairlift": entry.engines[0], "peer": entry.engines[1]},
        "rounds": [{"chairlift": ours, "peer": theirs} for ours, theirs in entry.rounds],
        "ratios": {c.figure.key: {"rounds": c.ratios, "median": median(c.ratios)} for c in compare(entry.rounds)},
    }


def print_perplexities(peer: str, text: Path, measured: Sequence[tuple[Setting, Perplexity]], console: Console) -> None:
    """A table, then the JSON line as the last line."""
    shown = Table(title=f"{peer}: perplexity of {text.name}", title_justify="left")
    for column in ("", "perplexity", "float32", "which tokens are scored"):
        shown.add_column(column, justify="right" if column in ("perplexity", "float32") else "left")
    for setting, perplexity in measured:
        float32 = "" if perplexity.float32 is None else f"{perplexity.float32:.3f}"
        shown.add_row(setting.label, f"{perplexity.value:.3f}", float32, perplexity.definition)
    console.print(shown)
    settings = [{**setting.to_dict(), **asdict(perplexity)} for setting, perplexity in measured]
    console.file.write(
        json.dumps({"benchmark": "peers_perplexity", "peer": peer, "text": str(text), "settings": settings}) + "\n"
    )
