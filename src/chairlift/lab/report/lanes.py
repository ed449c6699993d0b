"""Assigns the requests of a batch to lanes, one for each seat."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from chairlift.lab.report.trace import Floats, Residency, RowKind, RunTrace


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
        LaneCell(lane, phase.kind, residency.request.number, starts[phase.first], ends[phase.last])
        for residency, lane in zip(trace.residencies, assign_lanes(trace.residencies), strict=True)
        for phase in residency.phases
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
