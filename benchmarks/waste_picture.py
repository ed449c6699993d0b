"""The picture of the use of KV memory under each policy, next to published numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.drawing import Fill
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks import drawing
from chairlift.events import SLOT_KINDS
from chairlift.lab.presets import PRESETS
from chairlift.lab.report.recorded_run import RecordedRun

UNDIVIDED = Fill("waste, not divided", "#FFFFFF", "\\\\\\")
MIN_WRITTEN = 0.035

PUBLISHED: Mapping[str, Mapping[str, float]] = PRESETS["vllm-fig2"].data["studies"][0]["published"]
"""Percent of the KV memory by policy and kind."""


def draw(runs: Sequence[RecordedRun]) -> Figure:
    """Draw the mean shares of each run while requests waited, and below them, hatched, the published ones.

    The published shares are of another model and workload (Kwon et al., SOSP'23, Figure 2: OPT-13B on one A100,
    ShareGPT requests), and their external fragmentation includes all other waste.
    """
    heights = [len(runs), len(PUBLISHED)]
    figure = Figure(figsize=(drawing.WIDTH, 0.33 * sum(heights) + 1.7))
    ours, published = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    _draw_ours(ours, runs)
    _draw_published(published)
    published.xaxis.set_major_formatter(PercentFormatter(1))
    published.set_xlabel("share of KV memory")
    drawing.draw_legend(figure, [*drawing.KIND_FILLS.values(), UNDIVIDED])
    return figure


def _draw_ours(axes: Axes, runs: Sequence[RecordedRun]) -> None:
    labels = []
    for row, run in enumerate(runs):
        waste = run.waste()
        labels.append(run.label if waste.is_saturated else f"{run.label}\n(no waiting requests)")
        left = 0.0
        for kind in SLOT_KINDS:
            left += _bar(axes, row, left, waste.shares[kind], drawing.KIND_FILLS[kind]._replace(hatch=""))
    _finish(axes, labels, "these runs")


def _draw_published(axes: Axes) -> None:
    labels = []
    for row, (policy, shares) in enumerate(PUBLISHED.items()):
        labels.append(policy)
        left = 0.0
        for kind in SLOT_KINDS[:-1]:
            fill = drawing.KIND_FILLS[kind]
            left += _bar(axes, row, left, shares.get(kind, 0.0) / 100, fill._replace(hatch=fill.hatch or "\\\\"))
        _bar(axes, row, left, shares.get("waste", 0.0) / 100, UNDIVIDED)
    _finish(axes, labels, "published, another model and workload")


def _bar(axes: Axes, row: int, left: float, share: float, fill: Fill) -> float:
    if share:
        edge = "#666666" if fill is UNDIVIDED else "white"
        axes.barh(row, share, left=left, height=0.72, color=fill.colour, hatch=fill.hatch, edgecolor=edge, lw=0.5)
    if share >= MIN_WRITTEN:
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "boxstyle": "round,pad=0.15"}
        axes.text(left + share / 2, row, f"{100 * share:.1f}", size=8, ha="center", va="center", bbox=box)
    return share


def _finish(axes: Axes, labels: Sequence[str], title: str) -> None:
    axes.set_yticks(range(len(labels)), labels=labels)
    axes.set(xlim=(0, 1), ylim=(len(labels) - 0.5, -0.5), title=title)
    axes.tick_params(axis="y", length=0)
