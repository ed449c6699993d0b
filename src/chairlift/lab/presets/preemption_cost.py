"""The measures of studies of preemption: the time in which one request gets its K and V again."""

from __future__ import annotations

from chairlift.lab.presets.study import StudySystem
from chairlift.lab.sim.cost_model import StepShape, num_causal_pairs
from chairlift.lab.sim.roofline import block_copy_seconds


def measure(system: StudySystem, _seed: int) -> dict[str, float]:
    """Compute the time to swap a request out and in, and that to recompute it, with the block size of a system."""
    num_tokens, block_size = system.workload["num_tokens"], system.engine["block_size"]
    swapped = -(-num_tokens // block_size) * block_copy_seconds(block_size, system.model, system.device)
    recomputed = system.cost_model.seconds(StepShape(num_tokens, 1, 1, num_tokens, num_causal_pairs(0, num_tokens)))
    return {
        "swap_out_ms": swapped * 1e3,
        "swap_ms": 2 * swapped * 1e3,
        "recompute_ms": recomputed * 1e3,
        "swap_by_recompute": 2 * swapped / recomputed,
    }
