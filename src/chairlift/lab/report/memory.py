"""The kinds of KV slots over time, with the true output lengths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import repeat

import numpy as np

from chairlift.core.kv.kv_groups import KVGroups
from chairlift.events import SLOT_KINDS, Step
from chairlift.lab.report.trace import Floats, RunTrace, final_slots


def steps_with_true_kinds(trace: RunTrace) -> list[Step]:
    """The steps, whose reserved and internal slots are counted with the final lengths.

    A reserved slot will be written, and an internal slot (internal fragmentation) will not. The running engine cannot
    know this, and counts with `max_tokens` as the output length:

        |-- token states --|------ reserved ------|--------------- internal ---------------|   live
        |-- token states --|- reserved -|-------------------- internal --------------------|   true
                           written      P + n - 1          P + max_tokens - 1              held

    Only the border between reserved and internal changes, so the sum is still the pool. For aborted and unfinished
    requests see `final_slots`.
    """
    steps = []
    for step, reserved in zip(trace.steps, _reserved_slots(trace), strict=True):
        unwritten = step.reserved + step.internal
        reserved = min(reserved, unwritten)
        steps.append(replace(step, reserved=reserved, internal=unwritten - reserved))
    return steps


def _reserved_slots(trace: RunTrace) -> list[int]:
    """The number of slots in each step that are held and will be written. Shared slots are already written."""
    started = trace.started
    groups = KVGroups(tuple(started.kv_windows), started.block_size, started.max_num_batched_tokens)
    rows = []
    for step in trace.steps:
        columns = zip(step.num_computed, step.num_scheduled, step.num_draft or repeat(0), strict=False)
        rows.append(dict(zip(step.request_ids, columns, strict=True)))
    totals = [0] * len(rows)
    for residency in trace.residencies:
        request_id, final = residency.request.request_id, final_slots(residency.request)
        covered = 0  # slots of tokens in all groups, including those that are released or not shared
        reserved = 0
        for position in range(residency.first, residency.last + 1):
            covered += len(trace.steps[position].new_blocks.get(request_id, ())) * groups.block_size
            if request_id in rows[position]:
                computed, scheduled, draft = rows[position][request_id]
                if groups.has_windows and position == residency.first:
                    covered += sum(groups.first_blocks(computed)) * groups.block_size
                reserved = _num_reserved(groups, covered, computed + scheduled - draft, final)
            totals[position] += reserved
    return totals


def _num_reserved(groups: KVGroups, covered: int, computed: int, final: int) -> int:
    """The slots that will be written. Groups with a window cover the blocks of the computed tokens, and the others have
    the rest of the `covered` slots."""
    num_windows = sum(window is not None for window in groups.windows)
    num_full = len(groups.windows) - num_windows
    in_windows = groups.num_blocks(computed) * groups.block_size
    in_full = (covered - num_windows * in_windows) // max(1, num_full)
    return num_full * max(min(in_full, final) - computed, 0) + num_windows * max(min(in_windows, final) - computed, 0)


def kind_shares(steps: Iterable[Step]) -> Floats:
    """The slots of each kind as shares of the pool: [steps, kinds]."""
    slots = np.array([[getattr(step, kind) for kind in SLOT_KINDS] for step in steps], dtype=np.float64)
    shares: Floats = slots / slots.sum(axis=1, keepdims=True)
    return shares
