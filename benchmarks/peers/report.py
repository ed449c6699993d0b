"""Prints the machine and the engines, one table for each setting, and one JSON line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.figures import FigureComparison, compare
from benchmarks.peers.stage import EngineSetting
from benchmarks.peers.workload import PeerWorkload
from rich.console import Console
from rich.table import Table

from chairlift.lab.bench.machine import MachineFacts

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of a text with a peer.

    Attributes:
        definition: the tokens that are predicted.
        float32: perplexity of the same weights in float32 by the same definition. None if `chairlift bench perplexity`
            has the same definition and can measure it.
    """

    value: float
    definition: str
    float32: float | None = None


@dataclass(slots=True)
class MeasuredSetting:
    """A setting of the peer with its measurements.

    Attributes:
        ours: the setting of Chairlift next to it.
        rounds: figures of Chairlift and of the peer in each round.
        engines: versions and settings that both engines reported in the last round.
    """

    ours: EngineSetting
    setting: EngineSetting
    rounds: list[tuple[Figures, Figures]] = field(default_factory=list)
    engines: tuple[dict[str, Any], dict[str, Any]] = field(default_factory=lambda: ({}, {}))


def print_report(
    peer: str,
    machine: MachineFacts,
    workload: PeerWorkload,
    measured: Sequence[MeasuredSetting],
    console: Console,
) -> None:
    """Print the tables, then the JSON line."""
    memory = f"{machine.memory_bytes / (1 << 30):.0f} GiB"
    console.print(f"{machine.cpu}, {machine.num_cores} cores, {memory}, {', '.join(machine.vector_flags)}")
    console.print(f"seed {workload.seed}: {format_workload(workload)}", highlight=False)
    for entry in measured:
        console.print(table(peer, entry))
    console.file.write(json.dumps(record(peer, machine, workload, measured)) + "\n")


def format_workload(workload: PeerWorkload) -> str:
    """The workloads as one line of text."""
    lengths = f"{workload.single_input_len} + {workload.single_output_len}"
    parts = {
        "prompt": f"{workload.repeats} prompts of {workload.prompt_len} tokens",
        "burst": f"{workload.num_prompts} requests at once, prompt {workload.input_len}, output {workload.output_len}",
        "single": f"{workload.repeats} single streams of {lengths} tokens",
    }
    return "; ".join(parts[name] for name in workload.workloads)


def table(peer: str, entry: MeasuredSetting) -> Table:
    """Create a table with the median and the range of both engines, and the ratios."""
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


def _cells(comparison: FigureComparison) -> list[str]:
    figure, ratios = comparison.figure, comparison.ratios
    sides = [figure.cell(value) for side in (comparison.ours, comparison.theirs) for value in _spread(side)]
    by_round = [f"{ratio:.2f}" for ratio in ratios] if len(ratios) > 1 else []
    return [figure.heading, *sides, *by_round, f"{median(ratios):.2f}"]


def _spread(values: Sequence[float]) -> list[float]:
    """The median and, with several rounds, the minimum and the maximum."""
    statistics = (median, min, max) if len(values) > 1 else (median,)
    return [statistic(values) for statistic in statistics]


def _caption(entry: MeasuredSetting) -> str:
    variables = "".join(f"{name}={value} " for name, value in entry.setting.variables.items())
    versions = ", ".join(f"{name} {value}" for name, value in entry.engines[1].items())
    flags = " ".join(f"{name}={value}" for name, value in entry.setting.options.items() if name != "command")
    command = shlex.join(entry.setting.options.get("command", []))
    ours = f"Chairlift: {shlex.join(entry.ours.options['flags'])}"
    return f"ratio: Chairlift / peer, median of the rounds\n{ours}\n{versions}: {variables}{command}{flags}"


def record(
    peer: str, machine: MachineFacts, workload: PeerWorkload, measured: Sequence[MeasuredSetting]
) -> dict[str, Any]:
    """The comparison for JSON, in seconds, bytes and rates."""
    return {
        "benchmark": "peers",
        "peer": peer,
        "machine": asdict(machine),
        "workload": workload.to_dict(),
        "settings": [_setting_record(entry) for entry in measured],
    }


def _setting_record(entry: MeasuredSetting) -> dict[str, Any]:
    return {
        **entry.setting.to_dict(),
        "chairlift": entry.ours.to_dict(),
        "engines": {"chairlift": entry.engines[0], "peer": entry.engines[1]},
        "rounds": [{"chairlift": ours, "peer": theirs} for ours, theirs in entry.rounds],
        "ratios": {c.figure.key: {"rounds": c.ratios, "median": median(c.ratios)} for c in compare(entry.rounds)},
    }


def print_perplexities(
    peer: str, text: Path, measured: Sequence[tuple[EngineSetting, Perplexity]], console: Console
) -> None:
    """Print a table, then the JSON line."""
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
