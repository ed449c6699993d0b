"""The types of figures, and the colours, sizes and legends that all figures share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from chairlift.lab.report.run_log import RecordedRun
from chairlift.lab.report.timeline import stairs
from chairlift.lab.report.trace import Floats, RowKind

WIDTH: Final = 7.6
"""The width of a figure in inches, on the page and on paper. Text has at least 8 points."""

LETTERS_IN_A_LINE: Final = 88
MAX_OVER_TIME: Final = 6
"""Maximum number of runs in a figure over time, one above the other."""

STYLE: Final[dict[Any, Any]] = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "hatch.linewidth": 0.6,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "chairlift",
}

# The palette of Okabe and Ito (2008) for colour-blind readers. Adjacent areas also differ in lightness or hatching.
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#1A1A1A"
PALE, GREY = "#F1F1F1", "#9A9A9A"

OWNERS: Final = (SKY, ORANGE, GREEN, PURPLE, BLUE, YELLOW, VERMILLION)
LINES: Final = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DASHES: Final = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")


class Fill(NamedTuple):
    """The colour and hatching of an area, and its label in the legend."""

    label: str
    colour: str
    hatch: str = ""

    def patch(self) -> Patch:
        return Patch(facecolor=self.colour, edgecolor="#333333", linewidth=0.5, hatch=self.hatch, label=self.label)


ROW_FILLS: Final = {
    RowKind.PREFILL: Fill("prefill", VERMILLION),
    RowKind.DECODE: Fill("decode", SKY),
    RowKind.PADDING: Fill("END / padding", BLACK),
}
EMPTY_SEAT: Final = Fill("empty seat", PALE)

KIND_FILLS: Final = {
    "token_states": Fill("token states", BLUE),
    "reserved": Fill("reserved", ORANGE, "//"),
    "internal": Fill("internal fragmentation", VERMILLION, "xx"),
    "external": Fill("external fragmentation", GREY, "--"),
    "free": Fill("free", PALE),
}


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure with its title and caption. `key` is its anchor on the page and a part of its file name."""

    key: str
    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class OmittedFigure:
    """A figure that cannot be drawn from these runs, with the reason."""

    key: str
    title: str
    reason: str


def figure_of(num_rows: int, height: float, height_ratios: Sequence[float] | None = None) -> tuple[Figure, list[Axes]]:
    """A figure with panels one above the other, which share their x axis."""
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.subplots(num_rows, 1, squeeze=False, sharex=True, height_ratios=height_ratios)
    return figure, list(axes[:, 0])


def legend_above(figure: Figure, fills: Sequence[Fill], *lines: Line2D) -> None:
    """Draw a legend above the figure, in one row if the labels fit."""
    keys: list[Any] = [*(fill.patch() for fill in fills), *lines]
    fit = sum(len(str(key.get_label())) for key in keys) <= LETTERS_IN_A_LINE
    ncols = len(keys) if fit else -(-len(keys) // 2)
    figure.legend(handles=keys, loc="outside upper left", ncols=ncols, handlelength=1.8, columnspacing=1.4)


def lines_above(figure: Figure, axes: Axes, *others: Line2D) -> None:
    """Draw a legend of the lines of one panel above the figure."""
    keys: list[Any] = [*axes.get_legend_handles_labels()[0], *others]
    longest = max((len(str(key.get_label())) for key in keys), default=0)
    figure.legend(handles=keys, loc="outside upper left", ncols=3 if longest <= 30 else 2, handlelength=3)


def stack_areas(axes: Axes, edges: Floats, layers: Iterable[Floats], fills: Iterable[Fill]) -> float:
    """Draw the values of time bins as areas one above the other; returns the height of the largest sum."""
    below = np.zeros(2 * (len(edges) - 1))
    for values, fill in zip(layers, fills, strict=True):
        x, y = stairs(edges, values)
        axes.fill_between(x, below, below + y, facecolor=fill.colour, hatch=fill.hatch, edgecolor="white", linewidth=0)
        below = below + y
    return float(below.max())


def time_label(runs: Sequence[RecordedRun]) -> str:
    return "seconds" if all(run.trace.is_timed for run in runs) else "steps"


def over_time(runs: Sequence[RecordedRun]) -> tuple[list[RecordedRun], float, str]:
    """The runs that a figure over time shows, the duration of the longest one, and a note about the other runs."""
    shown = list(runs[:MAX_OVER_TIME])
    note = f" Shown are the first {MAX_OVER_TIME} of {len(runs)} runs." if len(runs) > len(shown) else ""
    return shown, max(run.trace.duration for run in shown), note


def with_kinds(runs: Sequence[RecordedRun]) -> tuple[list[RecordedRun], str]:
    """The runs whose log has the kinds of KV slots, and a note about the other runs."""
    others = [run.label for run in runs if run.kinds is None]
    note = f" Runs without kinds of slots in their logs: {', '.join(others)}." if others else ""
    return [run for run in runs if run.kinds is not None], note


NO_KINDS: Final = (
    "the logs have no kinds of KV slots (schema version 1, or an engine without a pool): record them again."
)


def start_at_zero(axes: Axes) -> None:
    """Let the y axis begin at 0, with space above the largest value; without values, draw "none"."""
    if axes.lines:
        axes.set_ylim(0, 1.08 * axes.dataLim.y1 or 1)
    else:
        draw_no_data(axes)


def draw_no_data(axes: Axes) -> None:
    """Draw "none" in a panel without data."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", color="#444444")


def line_style(index: int) -> dict[str, Any]:
    """The colour and dashes of the run or policy at `index`."""
    return {"color": LINES[index % len(LINES)], "linestyle": DASHES[index % len(DASHES)]}


def point_style(index: int) -> dict[str, Any]:
    return {**line_style(index), "marker": MARKERS[index % len(MARKERS)], "markersize": 5}
