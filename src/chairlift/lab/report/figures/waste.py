"""The figure of the use of KV memory under each policy, next to published numbers."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from chairlift.lab.presets.vllm_experiments import POLICIES
from chairlift.lab.presets.vllm_fig2 import PUBLISHED
from chairlift.lab.report.compare import waste_shares
from chairlift.lab.report.figures import drawing
from chairlift.lab.report.figures.drawing import Drawing, Fill, OmittedFigure
from chairlift.lab.report.memory import KINDS
from chairlift.lab.report.run_log import RecordedRun

TITLE = "Waste of KV memory by policy"
UNDIVIDED = Fill("waste, not divided", "#FFFFFF", "\\\\\\")
MIN_WRITTEN = 0.035


def draw(runs: Sequence[RecordedRun]) -> Drawing | OmittedFigure:
    usable, others_note = drawing.with_kinds(runs)
    if not usable:
        return OmittedFigure("waste", TITLE, drawing.NO_KINDS)
    heights = [len(usable), len(PUBLISHED)]
    figure, (ours, published) = drawing.figure_of(2, 0.33 * sum(heights) + 1.7, height_ratios=heights)
    _draw_ours(ours, usable)
    _draw_published(published)
    published.xaxis.set_major_formatter(PercentFormatter(1))
    published.set_xlabel("share of KV memory")
    drawing.legend_above(figure, [*drawing.KIND_FILLS.values(), UNDIVIDED])
    caption = (
        "Above: means over the time in which requests waited, with true output lengths; slots that are free then could "
        "not be used because there were no seats or the batch was closed. Runs without waiting requests show the mean "
        "over the whole run. Below, hatched: published shares (Kwon et al., SOSP'23, Figure 2: OPT-13B on one A100, "
        "ShareGPT requests) of another model and workload: compare the order and the pattern, not the numbers. There, "
        "external fragmentation includes all other waste."
        f"{others_note}"
    )
    return Drawing("waste", TITLE, caption, figure)


def _draw_ours(axes: Axes, runs: Sequence[RecordedRun]) -> None:
    labels = []
    for row, run in enumerate(runs):
        waste = waste_shares(run)
        labels.append(run.label if waste.is_saturated else f"{run.label}\n(no waiting requests)")
        left = 0.0
        for kind in KINDS:
            left += _bar(axes, row, left, waste.shares[kind], drawing.KIND_FILLS[kind]._replace(hatch=""))
    _finish(axes, labels, "these runs")


def _draw_published(axes: Axes) -> None:
    labels = []
    for row, (kv, shares) in enumerate(PUBLISHED.items()):
        labels.append(f"{POLICIES[kv]} = {kv}")
        left = 0.0
        for kind in KINDS[:-1]:
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
