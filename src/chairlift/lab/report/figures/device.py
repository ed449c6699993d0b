"""The figure of the work of the device over time: useful, recomputed and padding tokens, rows, and weights read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from chairlift.lab.report.figures import drawing
from chairlift.lab.report.figures.drawing import Drawing, Fill
from chairlift.lab.report.run_log import RecordedRun
from chairlift.lab.report.timeline import means, rates, stairs, time_edges
from chairlift.lab.report.trace import Floats

BINS = 150
FILLS = (
    Fill("useful tokens", drawing.SKY),
    Fill("recomputed after a preemption", drawing.PURPLE, "//"),
    Fill("padding", drawing.BLACK),
)


def draw(runs: Sequence[RecordedRun]) -> Drawing:
    shown, duration, note = drawing.over_time(runs)
    has_weights = any(run.started.weight_bytes for run in shown)
    ratios = [1.0] * len(shown) + [1.1] * (1 + has_weights)
    figure, panels = drawing.figure_of(len(ratios), 1.05 * sum(ratios) + 0.6, height_ratios=ratios)
    num_runs = len(shown)
    _draw_tokens(panels[:num_runs], shown, duration)
    _draw_lines(panels[num_runs], shown, duration, _rows)
    panels[num_runs].set_title("rows in the batch")
    panels[num_runs].set_ylim(top=1.6 * panels[num_runs].get_ylim()[1])
    panels[num_runs].legend(loc="upper right", ncols=3, handlelength=3)
    if has_weights:
        _draw_lines(panels[-1], shown, duration, _weight_bytes)
        panels[-1].set_title("weights read from memory")
        panels[-1].yaxis.set_major_formatter(EngFormatter(unit="B/s", sep=""))
    unit = drawing.time_label(shown)
    panels[-1].set_xlabel(f"{unit} since the run began")
    drawing.legend_above(figure, FILLS)
    caption = (
        "Above, for each run: tokens that the device computed, on the same scale. Below: rows in the batch, including "
        "finished ones, and the bytes of weights that steps read from memory. Each step reads all weights, so with few "
        f"rows the weights are read for few tokens. Values are means over 1/{BINS} of the longest run.{note}"
    )
    return Drawing("device", "Use of the device", caption, figure)


def _tokens(run: RecordedRun) -> list[Floats]:
    """The numbers of useful, recomputed and padding tokens of each step."""
    steps = run.trace.steps
    scheduled = np.array([sum(step.num_scheduled) for step in steps], dtype=np.float64)
    recomputed = np.array([step.num_recomputed for step in steps], dtype=np.float64)
    padding = np.array([sum(step.num_padding) for step in steps], dtype=np.float64)
    return [scheduled - recomputed, recomputed, padding]


def _rows(run: RecordedRun, edges: Floats) -> Floats:
    trace = run.trace
    return means(trace.starts, trace.held_ends(), np.array([float(len(s.request_ids)) for s in trace.steps]), edges)


def _weight_bytes(run: RecordedRun, edges: Floats) -> Floats:
    trace = run.trace
    return rates(trace.starts, trace.ends, np.full(len(trace.steps), float(run.started.weight_bytes)), edges)


def _draw_tokens(panels: Sequence[Axes], runs: Sequence[RecordedRun], duration: float) -> None:
    top = 0.0
    for axes, run in zip(panels, runs, strict=True):
        edges = time_edges(run.trace, duration, BINS)
        amounts = (rates(run.trace.starts, run.trace.ends, tokens, edges) for tokens in _tokens(run))
        top = max(top, drawing.stack_areas(axes, edges, amounts, FILLS))
        axes.set_title(f"{run.label}: tokens computed a {drawing.time_label(runs).rstrip('s')}")
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in panels:
        axes.set(xlim=(0, duration), ylim=(0, top * 1.05 or 1))


def _draw_lines(
    axes: Axes, runs: Sequence[RecordedRun], duration: float, values: Callable[[RecordedRun, Floats], Floats]
) -> None:
    for index, run in enumerate(runs):
        edges = time_edges(run.trace, duration, BINS)
        axes.plot(*stairs(edges, values(run, edges)), linewidth=1.3, label=run.label, **drawing.line_style(index))
    axes.set(xlim=(0, duration), ylim=(0, None))
