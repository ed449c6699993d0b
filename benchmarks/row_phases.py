"""What the rows of a request computed while it was in the batch, for pictures."""

from __future__ import annotations

import enum
from typing import NamedTuple

from chairlift.lab.report.trace import Residency, RunTrace


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


def row_phases(trace: RunTrace, residency: Residency) -> list[Phase]:
    """The phases of a residency in order, without overlap; steps without a row of the request are in none."""
    found: list[Phase] = []
    has_sampled = False
    for position in range(residency.first, residency.last + 1):
        step = trace.steps[position]
        if residency.request.request_id not in step.request_ids:
            continue
        index = step.request_ids.index(residency.request.request_id)
        kind = RowKind.DECODE if has_sampled else RowKind.PREFILL
        if not step.num_kept[index]:
            kind = RowKind.PADDING
        has_sampled |= step.num_new[index] > 0
        if found and found[-1].kind is kind and found[-1].last == position - 1:
            found[-1] = found[-1]._replace(last=position)
        else:
            found.append(Phase(kind, position, position))
    return found
