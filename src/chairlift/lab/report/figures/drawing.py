"""What a figure is on the page, and what all figures share: colours, sizes, text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from chairlift.lab.report.run_log import RecordedRun
from chairlift.lab.report.trace import RowKind

WIDTH: Final = 7.6
"""Inches; text is never smaller than 8 points, and the page never shows a figure smaller than this on paper."""

LETTERS_IN_A_LINE: Final = 88
MAX_OVER_TIME: Final = 6
"""Runs that figures over time show, one above the other."""

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

# Okabe and Ito (2008), told apart by colour-blind eyes; where areas touch, lightness or hatching tells them apart too.
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#1A1A1A"
PALE, GREY = "#F1F1F1", "#9A9A9A"

OWNERS: Final = (SKY, ORANGE, GREEN, PURPLE, BLUE, YELLOW, VERMILLION)
LINES: Final = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DASHES: Final = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")


class Fill(NamedTuple):
    """How an area looks, and what it is called in the legend."""

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
    """A figure with its place on the page. `key` names its file and its anchor; the caption says how to read it."""

    key: str
    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A figure that these runs do not give, and why."""

    key: str
    title: str
    reason: str


def figure_of(num_rows: int, height: float, **layout: Any) -> tuple[Figure, list[Axes]]:
    """A figure with panels one above the other."""
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.subplots(num_rows, 1, squeeze=False, **layout)
    return figure, list(axes[:, 0])


def legend_above(figure: Figure, fills: Sequence[Fill], *lines: Line2D) -> None:
    """Keys over the whole figure, in as many columns as fit."""
    keys: list[Any] = [*(fill.patch() for fill in fills), *lines]
    fit = sum(len(str(key.get_label())) for key in keys) <= LETTERS_IN_A_LINE
    ncols = len(keys) if fit else -(-len(keys) // 2)
    figure.legend(handles=keys, loc="outside upper left", ncols=ncols, handlelength=1.8, columnspacing=1.4)


def lines_above(figure: Figure, axes: Axes, *others: Line2D) -> None:
    """The lines of one panel, over the whole figure."""
    keys: list[Any] = [*axes.get_legend_handles_labels()[0], *others]
    longest = max((len(str(key.get_label())) for key in keys), default=0)
    figure.legend(handles=keys, loc="outside upper left", ncols=3 if longest <= 30 else 2, handlelength=3)


def time_label(runs: Sequence[RecordedRun]) -> str:
    return "seconds" if all(run.trace.is_timed for run in runs) else "steps"


def over_time(runs: Sequence[RecordedRun]) -> tuple[list[RecordedRun], float, str]:
    """The runs that a figure over time shows, the time of the longest, and what to say of the others."""
    shown = list(runs[:MAX_OVER_TIME])
    note = f" Shown are the first {MAX_OVER_TIME} of {len(runs)} runs." if len(runs) > len(shown) else ""
    return shown, max(run.trace.duration for run in shown), note


def with_kinds(runs: Sequence[RecordedRun]) -> tuple[list[RecordedRun], str]:
    """The runs whose log has the kinds of KV memory, and what to say of the others."""
    having = [run for run in runs if run.kinds is not None]
    lacking = [run.label for run in runs if run.kinds is None]
    return having, f" Without memory in their logs: {', '.join(lacking)}." if lacking else ""


NO_KINDS: Final = (
    "the logs do not say how KV memory was used (schema version 1, or an engine without a pool); "
    "record them again with this version."
)


def start_at_zero(axes: Axes) -> None:
    """Values upwards from 0, with room above the largest; says so if there are none."""
    if axes.lines:
        axes.set_ylim(0, 1.08 * axes.dataLim.y1 or 1)
    else:
        say_none(axes)


def say_none(axes: Axes) -> None:
    """The panel has nothing to show."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", color="#444444")


def line_style(index: int) -> dict[str, Any]:
    """Colour and dashes of the run or policy at `index`."""
    return {"color": LINES[index % len(LINES)], "linestyle": DASHES[index % len(DASHES)]}


def point_style(index: int) -> dict[str, Any]:
    return {**line_style(index), "marker": MARKERS[index % len(MARKERS)], "markersize": 5}
