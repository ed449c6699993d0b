"""The picture of KV memory over time by kind: used, wasted, and in which way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from benchmarks.drawing import KIND_FILLS, draw_legend, panels_over_time
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from chairlift.events import Step
from chairlift.lab.report.recorded_run import Floats, RecordedRun, RunTrace, kind_shares

BINS: Final = 300
LIVE_BORDER: Final[dict[str, Any]] = {"color": "black", "linestyle": (0, (4, 2)), "linewidth": 1.1}


def draw(runs: Sequence[RecordedRun]) -> Figure:
    """Draw the shares of the pool by kind, as means over bins of time.

    The kinds are computed with the true output lengths. A dashed line is the upper edge of the reserved slots that the
    running engine assumed from `max_tokens`.
    """
    figure, panels, duration = panels_over_time(runs, [1.5] * len(runs), 0.7)
    for axes, run in zip(panels, runs, strict=True):
        _draw_run(axes, run, duration)
    border = Line2D([], [], label="reserved, as seen live", **LIVE_BORDER)
    borders = [border] if any(run.true_steps != run.trace.steps for run in runs) else []
    draw_legend(figure, list(KIND_FILLS.values()), *borders)
    return figure


def _draw_run(axes: Axes, run: RecordedRun, duration: float) -> None:
    edges = time_edges(run.trace, duration, BINS)
    _stack_areas(axes, edges, _binned(run.trace, run.true_steps, edges))
    if run.true_steps != run.trace.steps:
        live = _binned(run.trace, run.trace.steps, edges)
        axes.plot(*stairs(edges, live[0] + live[1]), **LIVE_BORDER)
    axes.set(xlim=(0, duration), ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title(f"{run.label}: share of {run.started.num_blocks * run.started.block_size:,} slots")


def _stack_areas(axes: Axes, edges: Floats, layers: Iterable[Floats]) -> None:
    """Draw the values of time bins as areas one above the other, with the fills of the kinds."""
    below = np.zeros(2 * (len(edges) - 1))
    for values, fill in zip(layers, KIND_FILLS.values(), strict=True):
        x, y = stairs(edges, values)
        axes.fill_between(x, below, below + y, facecolor=fill.colour, hatch=fill.hatch, edgecolor="white", linewidth=0)
        below = below + y


def _binned(trace: RunTrace, steps: Sequence[Step], edges: Floats) -> Floats:
    """The shares of the pool as [kinds, bins]; all slots are free while the batch is empty."""
    ends = trace.held_ends()
    held = [means(trace.starts, ends, column, edges) for column in kind_shares(steps).T[:-1]]
    return np.array([*held, 1 - np.sum(held, axis=0)]).clip(0, 1)


def means(starts: Floats, ends: Floats, values: Floats, edges: Floats) -> Floats:
    """The mean over time of the values of steps in each bin; the value is 0 while no step runs.

    Args:
        starts, ends, values: [steps]; the steps in order and without overlap.
        edges: [bins + 1], rising.
    """
    times, total = np.empty(2 * len(starts)), np.empty(2 * len(starts))
    times[0::2], times[1::2] = starts, ends
    total[1::2] = np.cumsum(values * (ends - starts))
    total[0], total[2::2] = 0.0, total[1:-1:2]
    return np.diff(np.interp(edges, times, total)) / np.diff(edges)


def time_edges(trace: RunTrace, duration: float, num_bins: int) -> Floats:
    """The edges of bins over a run, with the width of `num_bins` bins over `duration`."""
    return np.append(np.arange(0, trace.duration, duration / num_bins), trace.duration)


def stairs(edges: Floats, values: Floats) -> tuple[Floats, Floats]:
    """x and y of a step line with a constant value in each bin."""
    return np.repeat(edges, 2)[1:-1], np.repeat(values, 2)
