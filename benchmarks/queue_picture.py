"""The picture of when each request waits and runs, which docs/policies shows for each order of the queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.drawing import PALE, ROW_FILLS, Fill, draw_legend, panels_over_time
from benchmarks.row_phases import RowKind, row_phases
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from chairlift.lab.report.recorded_run import RecordedRun

WAITING: Final = Fill("waiting", PALE)


def draw(runs: Sequence[RecordedRun]) -> Figure:
    """Draw a row for each request of each run, in the order of arrival, from its arrival to its end."""
    figure, panels, duration = panels_over_time(runs, [1.9] * len(runs), 0.6)
    for axes, run in zip(panels, runs, strict=True):
        _draw_run(axes, run, duration)
    draw_legend(figure, [WAITING, ROW_FILLS[RowKind.PREFILL], ROW_FILLS[RowKind.DECODE]])
    return figure


def _draw_run(axes: Axes, run: RecordedRun, duration: float) -> None:
    trace = run.trace
    finished = {request.index: 0.0 for request in trace.requests}
    for residency, phases in row_phases(trace):
        row = residency.request.index
        for phase in phases:
            start, end = trace.starts[phase.first], trace.ends[phase.last]
            axes.barh(row, end - start, left=start, height=0.8, color=ROW_FILLS[phase.kind].colour)
            finished[row] = max(finished[row], float(end))
    axes.barh(list(finished), list(finished.values()), height=0.8, color=PALE, zorder=-1)
    tenants = [request.arrived.tenant for request in trace.requests]
    axes.set_yticks(range(len(tenants)), labels=tenants if any(tenants) else None, size=5)
    mean = sum(finished.values()) / len(finished)
    axes.set(xlim=(0, duration), ylim=(len(finished) - 0.5, -0.5), ylabel="request")
    axes.set_title(f"{run.label}: all finished after {trace.duration:.0f} steps, on average after {mean:.0f}")
