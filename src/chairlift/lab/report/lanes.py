"""Who sits where: one lane a seat."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from chairlift.lab.report.trace import Floats, RowKind, RunTrace, Stay


class LaneCell(NamedTuple):
    """Consecutive steps of one stay that look alike. `request`: its number by arrival; times in seconds."""

    lane: int
    kind: RowKind
    request: int
    start: float
    end: float


def assign_lanes(stays: Sequence[Stay]) -> list[int]:
    """The lane of every stay, given in the order of admission: the lowest one that is free in its first step."""
    lanes: list[int] = []
    occupied: list[tuple[int, int]] = []
    free: list[int] = []
    num_lanes = 0
    for stay in stays:
        while occupied and occupied[0][0] < stay.first:
            heapq.heappush(free, heapq.heappop(occupied)[1])
        if not free:
            heapq.heappush(free, num_lanes)
            num_lanes += 1
        lanes.append(heapq.heappop(free))
        heapq.heappush(occupied, (stay.last, lanes[-1]))
    return lanes


def lane_cells(trace: RunTrace) -> list[LaneCell]:
    """Every cell of the run; a lane is empty wherever it has none."""
    starts, ends = trace.starts.tolist(), trace.ends.tolist()
    return [
        LaneCell(lane, phase.kind, stay.request.number, starts[phase.first], ends[phase.last])
        for stay, lane in zip(trace.stays, assign_lanes(trace.stays), strict=True)
        for phase in stay.phases
    ]


def lane_shares(cells: Iterable[LaneCell], num_lanes: int, duration: float, num_columns: int) -> Floats:
    """How much of each column's time a lane spends on each kind: [kinds, lanes, columns], in 0..1.

    For runs with more cells than a picture has pixels.
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
