"""What the rows of a request computed while it was in the batch, for pictures."""

from __future__ import annotations

import enum
from typing import NamedTuple

from chairlift.lab.report.recorded_run import Residency, RunTrace


class RowKind(enum.IntEnum):
    """The kind of a row in a step. PADDING: only padding is computed, before a short prompt or after the end."""

    PREFILL = 0
    DECODE = 1
    PADDING = 2


class Phase(NamedTuple):
    """Consecutive steps with one kind of row; `last` is included."""

    kind: RowKind
    first: int
    last: int


def row_phases(trace: RunTrace) -> list[tuple[Residency, list[Phase]]]:
    """Each residency with its phases in order, without overlap; steps without a row of the request are in none."""
    columns = ((step.request_ids, zip(step.num_kept, step.num_new, strict=True)) for step in trace.steps)
    rows = [dict(zip(*each, strict=True)) for each in columns]
    return [(residency, _phases(residency, rows)) for residency in trace.residencies]


def _phases(residency: Residency, rows: list[dict[str, tuple[int, int]]]) -> list[Phase]:
    """The phases of a residency.

    Args:
        rows: the kept and the new tokens of each request of each step.
    """
    found: list[Phase] = []
    has_sampled = False
    for position in range(residency.first, residency.last + 1):
        if (row := rows[position].get(residency.request.request_id)) is None:
            continue
        num_kept, num_new = row
        kind = RowKind.DECODE if has_sampled else RowKind.PREFILL
        if not num_kept:
            kind = RowKind.PADDING
        has_sampled |= num_new > 0
        if found and found[-1].kind is kind and found[-1].last == position - 1:
            found[-1] = found[-1]._replace(last=position)
        else:
            found.append(Phase(kind, position, position))
    return found
