"""Writes the values of several policies to a file: CSV for programs, or a picture."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from chairlift.errors import ConfigError
from chairlift.lab.bench.benchmark_result import RunValues
from chairlift.lab.metrics.run import REPORTED_METRICS
from chairlift.system.output_files import check_writable, unwritable_file_error

PICTURES: Final = (".png", ".pdf", ".svg")

DRAWN: Final = ("output_tokens_per_s", "e2e_latency_mean", "ttft_p50", "ttft_p99", "preemptions", "mean_busy_seats")
"""The metrics of a picture, if a policy has them."""


def check_values_file(path: Path) -> None:
    """Raise ConfigError if values cannot be written to this file."""
    if path.suffix not in (".csv", *PICTURES):
        raise ConfigError(f"output={path} must end with .csv, {', '.join(PICTURES)}: rename the file")
    if path.suffix in PICTURES and find_spec("matplotlib") is None:
        raise ConfigError(
            f"output={path} needs matplotlib, which is not installed: run `pip install matplotlib`, or write .csv"
        )
    check_writable("output", path)


def write_values(values: Mapping[str, RunValues], path: Path) -> None:
    """Write the values of each policy in the format that the name of the file ends with.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        (_draw if path.suffix in PICTURES else _write_csv)(values, path)
    except OSError as error:
        raise unwritable_file_error("output", path, error) from None


def _write_csv(values: Mapping[str, RunValues], path: Path) -> None:
    """Write a row for each policy, in seconds, bytes and shares."""
    keys = [each.key for each in REPORTED_METRICS if any(each.key in found for found in values.values())]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["policy", *keys])
        writer.writerows([name, *(found.get(key) for key in keys)] for name, found in values.items())


def _draw(values: Mapping[str, RunValues], path: Path) -> None:
    from matplotlib.figure import Figure

    drawn, found = [each for each in REPORTED_METRICS if each.key in DRAWN], values.values()
    figure = Figure(figsize=(7.6, 1.4 + 0.5 * len(values)), layout="constrained")
    for axes, metric in zip(figure.subplots(2, 3, sharey=True).flat, drawn, strict=True):
        bars = axes.barh(list(values), [metric.scale * (each.get(metric.key) or 0.0) for each in found])
        axes.bar_label(bars, [metric.cell(each.get(metric.key)) for each in found], fontsize=7)
        axes.set_title(metric.heading, fontsize=8, loc="left")
        axes.margins(x=0.25)
        axes.tick_params(labelsize=7)
    axes.invert_yaxis()
    figure.savefig(path, dpi=160)
