"""The colours, sizes, legends and files that all pictures share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import matplotlib as mpl
from benchmarks.row_phases import RowKind
from docs.palette import WORDS, colour
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from chairlift.events import SLOT_KINDS
from chairlift.lab.report.recorded_run import RecordedRun, RunTrace

WIDTH: Final = 7.6
"""The width of a picture in inches, on a page and on paper. Text has at least 8 points."""

DOTS_PER_INCH: Final = 160
LETTERS_IN_A_LINE: Final = 88

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

LINES: Final = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DASHES: Final = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


class Fill(NamedTuple):
    """The colour and hatching of an area, and its label in the legend."""

    label: str
    colour: str
    hatch: str = ""

    def patch(self) -> Patch:
        return Patch(facecolor=self.colour, edgecolor="#333333", linewidth=0.5, hatch=self.hatch, label=self.label)


def _fill(name: str, hatch: str = "", label: str = "") -> Fill:
    return Fill(label or WORDS[name], colour(name), hatch)


ROW_FILLS: Final = {kind: _fill(kind.name.lower()) for kind in RowKind}
EMPTY_SEAT: Final = _fill("cell-empty", label="empty seat")
HATCHES: Final = {"reserved": "//", "internal": "xx", "external": ".."}
KIND_FILLS: Final = {kind: _fill(kind, HATCHES.get(kind, "")) for kind in SLOT_KINDS}


def is_timed(trace: RunTrace) -> bool:
    """False if the clock of a run did not move, so that its times are numbers of steps."""
    return trace.steps[-1].time > trace.origin


def panels_over_time(
    runs: Sequence[RecordedRun], heights: Sequence[float], margin: float
) -> tuple[Figure, list[Axes], float]:
    """A figure with a panel for each run, one above the other, and the duration of the longest run.

    Args:
        heights: the height of each panel in inches.
        margin: the height of the legend and the labels in inches.
    """
    figure = Figure(figsize=(WIDTH, sum(heights) + margin))
    panels = figure.subplots(len(runs), 1, squeeze=False, sharex=True, height_ratios=list(heights))[:, 0]
    unit = "seconds" if all(is_timed(run.trace) for run in runs) else "steps"
    panels[-1].set_xlabel(f"{unit} since the run began")
    return figure, list(panels), max(run.trace.duration for run in runs)


def draw_legend(figure: Figure, fills: Sequence[Fill], *lines: Line2D) -> None:
    """Draw a legend above the figure, in one row if the labels fit."""
    keys: list[Any] = [*(fill.patch() for fill in fills), *lines]
    fit = sum(len(str(key.get_label())) for key in keys) <= LETTERS_IN_A_LINE
    ncols = len(keys) if fit else -(-len(keys) // 2)
    figure.legend(handles=keys, loc="outside upper left", ncols=ncols, handlelength=1.8, columnspacing=1.4)


def line_style(index: int) -> dict[str, Any]:
    """The colour and dashes of the run or policy at `index`."""
    return {"color": LINES[index % len(LINES)], "linestyle": DASHES[index % len(DASHES)]}


def save_picture(picture: Figure, path: Path) -> None:
    """Write a picture to a PNG file."""
    with mpl.rc_context(STYLE):
        picture.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})
