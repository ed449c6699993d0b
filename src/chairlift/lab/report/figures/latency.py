"""The figure of the distributions of latency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from chairlift.lab.report.compare import cdf
from chairlift.lab.report.figures.drawing import WIDTH, Drawing, OmittedFigure, draw_no_data, line_style, lines_above
from chairlift.lab.report.run_log import RecordedRun

KEY, TITLE = "latency", "Latency of requests"
Values = Callable[[RecordedRun], list[float]]


def draw(runs: Sequence[RecordedRun]) -> Drawing | OmittedFigure:
    timed = [run for run in runs if run.trace.is_timed and _ttft(run)]
    if not timed:
        return OmittedFigure(KEY, TITLE, "no run with a moving clock has an output token.")
    figure = Figure(figsize=(WIDTH, 3.0 + 0.16 * len(timed)))
    panels = figure.subplots(1, 3, sharey=True)
    for axes, panel in zip(panels, PANELS, strict=True):
        _draw_panel(axes, panel, timed)
    panels[0].set_ylabel("share of requests at most as slow")
    lines_above(figure, panels[0])
    caption = (
        "Cumulative distributions: the median is at height 0.5, the 99th percentile at 0.99. Left is better. Wide axes "
        "are logarithmic. TTFT is the time from arrival to the first token, ITL the time between two tokens (here the "
        "height is a share of these times), E2E latency the time from arrival to the last token. A static batch "
        "returns all tokens when it ends, so its TTFT equals its E2E latency and it has no ITL."
    )
    return Drawing(KEY, TITLE, caption, figure)


def _ttft(run: RecordedRun) -> list[float]:
    return [value for r in run.requests if (value := r.ttft) is not None]


def _itl(run: RecordedRun) -> list[float]:
    return [] if run.is_static else [gap for r in run.requests for gap in r.itls]


def _e2e(run: RecordedRun) -> list[float]:
    return [value for r in run.requests if (value := r.e2e_latency) is not None]


class Panel(NamedTuple):
    """A distribution: its title, its values in seconds, and the unit of its axis with its number in a second."""

    title: str
    values: Values
    unit: str
    scale: float


PANELS = (
    Panel("TTFT", _ttft, "seconds", 1.0),
    Panel("ITL", _itl, "milliseconds", 1e3),
    Panel("E2E latency", _e2e, "seconds", 1.0),
)


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[RecordedRun]) -> None:
    for index, run in enumerate(runs):
        label = f"{run.label}, {run.arrivals}"
        if of_run := panel.values(run):
            axes.plot(*cdf(of_run), drawstyle="steps-post", label=label, linewidth=1.3, **line_style(index))
    axes.set(title=panel.title, ylim=(0, 1.01))
    if axes.lines:
        axes.set_xlabel(panel.unit)
        _scale(axes, panel.scale)
    else:
        draw_no_data(axes)
    axes.grid(True, color="#DDDDDD", linewidth=0.5)


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
