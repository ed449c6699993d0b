"""KV memory over time by kind: used, wasted, and in which way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from chairlift.lab.report.figures import drawing
from chairlift.lab.report.figures.drawing import Drawing, OmittedFigure
from chairlift.lab.report.memory import MemoryKinds, kind_shares
from chairlift.lab.report.run_log import RecordedRun
from chairlift.lab.report.timeline import means, stairs, time_edges
from chairlift.lab.report.trace import Floats

BINS = 300
TITLE = "KV memory by kind"
LIVE_BORDER: Final[dict[str, Any]] = {"color": "black", "linestyle": (0, (4, 2)), "linewidth": 1.1}


def draw(runs: Sequence[RecordedRun]) -> Drawing | OmittedFigure:
    usable, others_note = drawing.with_kinds(runs)
    if not usable:
        return OmittedFigure("memory-kinds", TITLE, drawing.NO_KINDS)
    shown, duration, note = drawing.over_time(usable)
    figure, panels = drawing.figure_of(len(shown), 1.5 * len(shown) + 0.7)
    for axes, run in zip(panels, shown, strict=True):
        _draw_run(axes, run, duration)
    panels[-1].set_xlabel(f"{drawing.time_label(shown)} since the run began")
    border = Line2D([], [], label="reserved, as seen live", **LIVE_BORDER)
    borders = [border] if any(run.kinds != run.live for run in shown) else []
    drawing.legend_above(figure, list(drawing.KIND_FILLS.values()), *borders)
    caption = (
        "Each slot of the pool has one kind. Token states are in use. Reserved slots are held and will be written. "
        "Internal fragmentation is held and will never be written. External fragmentation is lost to the rounding of "
        "the allocator, or is free while the next request waits for memory. The kinds are computed with the true "
        "output lengths; the dashed line is the upper edge of the reserved slots that the running engine assumed from "
        f"max_tokens. Values are means over 1/{BINS} of the longest run.{others_note}{note}"
    )
    return Drawing("memory-kinds", TITLE, caption, figure)


def _draw_run(axes: Axes, run: RecordedRun, duration: float) -> None:
    assert run.kinds is not None
    assert run.live is not None
    edges = time_edges(run.trace, duration, BINS)
    drawing.stack_areas(axes, edges, _binned(run, run.kinds, edges), drawing.KIND_FILLS.values())
    if run.kinds != run.live:
        live = _binned(run, run.live, edges)
        axes.plot(*stairs(edges, live[0] + live[1]), **LIVE_BORDER)
    axes.set(xlim=(0, duration), ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title(f"{run.label}: share of {run.trace.num_slots:,} slots")


def _binned(run: RecordedRun, kinds: Sequence[MemoryKinds], edges: Floats) -> Floats:
    """The shares of the pool as [kinds, bins]; all slots are free while the batch is empty."""
    trace = run.trace
    ends = trace.held_ends()
    held = [means(trace.starts, ends, column, edges) for column in kind_shares(kinds).T[:-1]]
    return np.array([*held, 1 - np.sum(held, axis=0)]).clip(0, 1)
