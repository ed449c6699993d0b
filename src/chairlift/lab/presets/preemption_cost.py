"""The runner of studies of preemption: the time in which one request gets its K and V again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from chairlift.lab.presets.study import MeasuredValue, Row, Study, StudyResult
from chairlift.lab.sim.cost_model import StepShape, num_causal_pairs
from chairlift.lab.sim.swap_cost import simulate_swap

MILLISECONDS: Final = 1e3


def run(study: Study, advance: Callable[[], object]) -> StudyResult:
    """Compute the time to swap a request out and in, and that to recompute it, with the block size of each system."""
    rows: dict[str, Row] = {}
    keys = {}
    for system in study.systems():
        num_tokens, block_size = system.workload["num_tokens"], system.engine["block_size"]
        swap = simulate_swap(1, block_size, system.model, system.device)
        assert swap is not None
        swapped = -(-num_tokens // block_size) * swap.block_seconds
        recomputed = system.cost_model.seconds(StepShape(num_tokens, 1, 1, num_tokens, num_causal_pairs(0, num_tokens)))
        values = {
            "swap_out_ms": swapped * MILLISECONDS,
            "swap_ms": 2 * swapped * MILLISECONDS,
            "recompute_ms": recomputed * MILLISECONDS,
            "swap_by_recompute": 2 * swapped / recomputed,
        }
        rows[system.label] = {name: MeasuredValue(values[name]) for name in study.measures}
        keys[system.label] = (system.case, system.name)
        advance()
    return StudyResult(study, rows, keys)
