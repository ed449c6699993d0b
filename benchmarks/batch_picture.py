"""The picture of the batch over time, with one lane for each seat."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from benchmarks.drawing import EMPTY_SEAT, ROW_FILLS, WIDTH, draw_legend, is_timed, panels_over_time
from benchmarks.row_phases import RowKind, row_phases
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from chairlift.lab.report.recorded_run import Floats, RecordedRun, Residency, RunTrace

MAX_CELLS = 2000
"""With more cells, the lanes are drawn as an image with COLUMNS columns of mean colours."""
COLUMNS = 1600
MAX_EDGED = 150
MAX_NUMBERS = 60
GAP = 0.16


class LaneCell(NamedTuple):
    """Consecutive steps of a residency with the same kind of row. `request` is the number of the request by arrival."""

    lane: int
    kind: RowKind
    request: int
    start: float
    end: float


def assign_lanes(residencies: Sequence[Residency]) -> list[int]:
    """The lane of each residency, in the order of admission: the lowest lane that is free in its first step."""
    lanes: list[int] = []
    occupied: list[tuple[int, int]] = []
    free: list[int] = []
    num_lanes = 0
    for residency in residencies:
        while occupied and occupied[0][0] < residency.first:
            heapq.heappush(free, heapq.heappop(occupied)[1])
        if not free:
            heapq.heappush(free, num_lanes)
            num_lanes += 1
        lanes.append(heapq.heappop(free))
        heapq.heappush(occupied, (residency.last, lanes[-1]))
    return lanes


def lane_cells(trace: RunTrace) -> list[LaneCell]:
    """The cells of all residencies of a run."""
    starts, ends = trace.starts.tolist(), trace.ends.tolist()
    return [
        LaneCell(lane, phase.kind, residency.request.index, starts[phase.first], ends[phase.last])
        for (residency, phases), lane in zip(row_phases(trace), assign_lanes(trace.residencies), strict=True)
        for phase in phases
    ]


def lane_shares(cells: Iterable[LaneCell], num_lanes: int, duration: float, num_columns: int) -> Floats:
    """The share of the time of each column for each kind of row and lane: [kinds, lanes, columns], from 0 to 1.

    It is used to draw runs with more cells than an image has pixels.
    """
    shares = np.zeros((len(RowKind), num_lanes, num_columns))
    scale = num_columns / duration
    for cell in cells:
        row = shares[cell.kind, cell.lane]
        start, end = cell.start * scale, min(cell.end * scale, num_columns)
        first, last = int(start), min(int(end), num_columns - 1)
        if first >= last:
            row[min(first, num_columns - 1)] += end - start
            continue
        row[first] += first + 1 - start
        row[first + 1 : last] += 1
        row[last] += end - last
    return np.minimum(shares, 1.0)


def draw(runs: Sequence[RecordedRun]) -> Figure:
    """Draw the seats of each run over one time axis.

    A request occupies the lowest free seat from its admission until it leaves the batch, and its number counts the
    requests in the order of arrival. In a run with many steps, a column shows the mean colour of its time.
    """
    cells = [lane_cells(run.trace) for run in runs]
    lanes = [1 + max(cell.lane for cell in of_run) for of_run in cells]
    heights = [min(max(0.13 * num_lanes, 0.6), 2.4) for num_lanes in lanes]
    figure, panels, duration = panels_over_time(runs, heights, 0.48 * len(runs) + 0.5)
    for axes, run, of_run, num_lanes in zip(panels, runs, cells, lanes, strict=True):
        _draw_run(axes, run, of_run, num_lanes, duration)
    figure.align_ylabels(panels)
    draw_legend(figure, [*ROW_FILLS.values(), EMPTY_SEAT])
    return figure


def _draw_run(axes: Axes, run: RecordedRun, cells: Sequence[LaneCell], num_lanes: int, duration: float) -> None:
    end = run.trace.duration
    axes.fill_between([0, end], 0, num_lanes, color=EMPTY_SEAT.colour, linewidth=0, zorder=-1)
    if len(cells) > MAX_CELLS:
        _draw_image(axes, cells, num_lanes, end)
    else:
        _draw_cells(axes, cells, duration)
    axes.set(xlim=(0, duration), ylim=(num_lanes, 0), ylabel="seat")
    axes.set_yticks(_lane_ticks(num_lanes), labels=[str(int(tick)) for tick in _lane_ticks(num_lanes) - 0.5])
    axes.set_title(f"{run.label}: {run.metrics.num_answered} requests, {_end(run)}")
    axes.spines["left"].set_visible(False)
    if end < duration:
        axes.axvline(end, color="#333333", linewidth=1)


def _end(run: RecordedRun) -> str:
    if not is_timed(run.trace):
        return f"{len(run.trace.steps):,} steps"
    return f"{run.trace.duration:.3g} s, {run.metrics.output_tokens_per_s:.3g} output tokens/s"


def _lane_ticks(num_lanes: int) -> Floats:
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, num_lanes) if num_lanes / n <= 8)
    return np.arange(0, num_lanes, every, dtype=np.float64) + 0.5


def _draw_cells(axes: Axes, cells: Sequence[LaneCell], duration: float) -> None:
    for kind, of_kind in groupby(sorted(cells, key=attrgetter("kind")), key=attrgetter("kind")):
        corners = [
            [
                (c.start, c.lane + GAP / 2),
                (c.end, c.lane + GAP / 2),
                (c.end, c.lane + 1 - GAP / 2),
                (c.start, c.lane + 1 - GAP / 2),
            ]
            for c in of_kind
        ]
        edge = {"edgecolors": "white", "linewidths": 0.3} if len(cells) <= MAX_EDGED else {"linewidths": 0}
        axes.add_collection(PolyCollection(corners, facecolors=ROW_FILLS[kind].colour, **edge))
    if len({cell.request for cell in cells}) <= MAX_NUMBERS:
        _write_numbers(axes, cells, duration)


def _write_numbers(axes: Axes, cells: Sequence[LaneCell], duration: float) -> None:
    """Write the number of each request in the middle of its longest decode, if there is space."""
    longest: dict[tuple[int, int], LaneCell] = {}
    for cell in cells:
        key = (cell.request, cell.lane)
        if cell.kind is RowKind.DECODE and (key not in longest or length(cell) > length(longest[key])):
            longest[key] = cell
    for cell in longest.values():
        if length(cell) / duration * WIDTH > 0.07 * len(str(cell.request + 1)) + 0.05:
            middle = (cell.start + cell.end) / 2
            axes.text(middle, cell.lane + 0.54, str(cell.request + 1), size=8, ha="center", va="center", color="white")


def length(cell: LaneCell) -> float:
    return cell.end - cell.start


def _draw_image(axes: Axes, cells: Sequence[LaneCell], num_lanes: int, end: float) -> None:
    shares = lane_shares(cells, num_lanes, end, COLUMNS)
    colours = np.array([to_rgb(ROW_FILLS[kind].colour) for kind in RowKind])
    empty = 1 - shares.sum(axis=0, keepdims=True).clip(0, 1)
    empty_colour = np.array(to_rgb(EMPTY_SEAT.colour))
    image = np.einsum("klc,kr->lcr", shares, colours) + empty[0, :, :, None] * empty_colour
    lanes = np.repeat((image.clip(0, 1) * 255).astype(np.uint8), 6, axis=0)
    lanes[5::6] = 255
    axes.imshow(lanes, extent=(0, end, num_lanes, 0), aspect="auto", interpolation="none")
