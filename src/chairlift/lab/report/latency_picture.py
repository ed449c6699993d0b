"""The picture of the distributions of latency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from chairlift.lab.report.drawing import WIDTH, NothingToDraw, line_style
from chairlift.lab.report.run_log import RecordedRun
from chairlift.lab.report.trace import Floats

CDF_POINTS: Final = 200


class Panel(NamedTuple):
    """The panel of one distribution: its title, its values in seconds, and the unit of its axis with its number in a
    second."""

    title: str
    values: Callable[[RecordedRun], list[float]]
    unit: str
    scale: float


def _ttft(run: RecordedRun) -> list[float]:
    return [value for r in run.requests if (value := r.ttft) is not None]


def _itl(run: RecordedRun) -> list[float]:
    return [gap for r in run.requests for gap in r.itls]


def _e2e(run: RecordedRun) -> list[float]:
    return [value for r in run.requests if (value := r.e2e_latency) is not None]


PANELS: Final = (
    Panel("TTFT", _ttft, "seconds", 1.0),
    Panel("ITL", _itl, "milliseconds", 1e3),
    Panel("E2E latency", _e2e, "seconds", 1.0),
)


def draw(runs: Sequence[RecordedRun]) -> Figure | NothingToDraw:
    """Draw the cumulative distributions of TTFT, ITL and E2E latency of all runs."""
    timed = [run for run in runs if run.trace.is_timed and _ttft(run)]
    if not timed:
        return NothingToDraw("no run with a moving clock has an output token")
    figure = Figure(figsize=(WIDTH, 3.0 + 0.16 * len(timed)))
    panels = figure.subplots(1, 3, sharey=True)
    for axes, panel in zip(panels, PANELS, strict=True):
        _draw_panel(axes, panel, timed)
    panels[0].set_ylabel("share of requests at most as slow")
    handles, labels = panels[0].get_legend_handles_labels()
    ncols = 3 if max(map(len, labels)) <= 30 else 2
    figure.legend(handles, labels, loc="outside upper left", ncols=ncols, handlelength=3)
    return figure


def _label(run: RecordedRun) -> str:
    """The label of a run, with its goodput if its requests have SLOs."""
    values = run.metrics.values()
    if "goodput" not in values:
        return run.label
    return f"{run.label}, goodput {values['goodput']:.3g}/s ({values['slo_attainment']:.0%})"


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[RecordedRun]) -> None:
    for index, run in enumerate(runs):
        if of_run := panel.values(run):
            axes.plot(*cdf(of_run), drawstyle="steps-post", label=_label(run), linewidth=1.3, **line_style(index))
    axes.set(title=panel.title, ylim=(0, 1.01))
    if axes.lines:
        axes.set_xlabel(panel.unit)
        _scale(axes, panel.scale)
    else:
        axes.set_xticks([])
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", color="#444444")
    axes.grid(True, color="#DDDDDD", linewidth=0.5)


def cdf(values: Sequence[float], num_points: int = CDF_POINTS) -> tuple[Floats, Floats]:
    """The points of a cumulative distribution: values in ascending order, and the share of values at most as large.

    With more than `num_points` values, the points are quantiles.
    """
    if len(values) > num_points:
        shares = np.linspace(0, 1, num_points)
        return np.quantile(values, shares), shares
    ordered = np.sort(values)
    return np.append(ordered[:1], ordered), np.arange(len(values) + 1) / len(values)


def _scale(axes: Axes, scale: float) -> None:
    """Make the x axis logarithmic, or linear if it spans less than half a decade; its labels are multiplied."""
    low, high = axes.dataLim.intervalx
    if low > 0 and high / low > 10**0.5:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 50 else (1,)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{scale * value:g}"))
    axes.minorticks_off()
