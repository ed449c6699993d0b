"""Figure 2 of the PagedAttention paper: the use of the KV memory, by policy."""

from __future__ import annotations

from typing import Final

from chairlift.lab.presets import PresetOptions, PresetResult, Table, format_number
from chairlift.lab.presets import vllm_experiments as vllm

NUM_PROMPTS: Final = 2000

PARTS: Final = {
    "token_states": "token states",
    "reserved": "reserved",
    "internal": "internal fragmentation",
    "external": "external fragmentation and others",
}

PUBLISHED: Final[dict[str, dict[str, float]]] = {
    "max": {"token_states": 20.4, "reserved": 13.3, "internal": 57.3, "external": 8.9},
    "pow2": {"token_states": 26.8, "reserved": 17.9, "internal": 13.6, "external": 41.6},
    "oracle": {"token_states": 38.2, "reserved": 25.2, "internal": 0.0, "external": 36.6},
    "paged": {"token_states": 96.3, "waste": 3.7},
}
"""Percent of the KV memory. The figure has only the sum of vLLM's waste."""

NOTES: Final = [
    "Means over the steps of a saturated queue, every step with equal weight. The means of the lengths are the "
    "paper's. The paper does not publish which prompt belongs to which output, so they are drawn independently.",
    "Reserved and internal slots are divided by the true output length, as in the paper: reserved slots will be "
    "written, internal ones never. Reservations here are full blocks of 16 slots, so up to 15 slots per request are "
    "internal here that the paper, whose Orca has no blocks, counts as rounding by the buddy allocator (external). "
    "This explains the few tenths under Oracle, where the paper has none, and more internal and less external under "
    "Pow2.",
    "External contains the rounding of the buddy allocator, and every free slot while the head of the queue is blocked "
    "for lack of memory. Under Max these are the slots that 7 x 2048 do not use.",
    "The last sampled token has no K and V: a request uses prompt + output - 1 slots.",
]


def part_share(run: vllm.SteadyState, name: str) -> float:
    """Returns a part of the figure in percent; "external" includes the few free slots."""
    if name == "external":
        return run.shares["external"] + run.shares["free"]
    if name == "waste":
        return 100 - run.shares["token_states"]
    return run.shares[name]


def run(options: PresetOptions) -> PresetResult:
    """Simulates ShareGPT lengths, all requests at once, under each policy with several seeds."""
    seed, count = options.workload_seed or 0, options.num_prompts or NUM_PROMPTS
    workloads = [vllm.draw_requests("sharegpt", seed + i, count) for i in range(vllm.NUM_SEEDS)]
    rows, ours = [], {}
    for kv, policy in vllm.POLICIES.items():
        runs = [vllm.steady_state(kv, requests) for requests in workloads]
        names = [*PARTS, "waste"] if "waste" in PUBLISHED[kv] else [*PARTS]
        shares = {name: vllm.SeedStatistics.from_values([part_share(run, name) for run in runs]) for name in names}
        ours[kv] = {name: round(share.mean, 2) for name, share in shares.items()}
        rows += [_row(policy, kv, name, share) for name, share in shares.items()]
    columns = ["policy", "slots", "published, %", "ours, %", "seeds, +-"]
    return PresetResult(
        constants=[
            ("requests", f"{count:,} at once, ShareGPT lengths, seeds {seed} to {seed + vllm.NUM_SEEDS - 1}"),
            vllm.COUNTED,
            *vllm.constants(),
        ],
        tables=[Table("Slots of the KV memory by use", columns, rows)],
        notes=NOTES,
        published=PUBLISHED,
        ours=ours,
    )


def _row(policy: str, kv: str, name: str, share: vllm.SeedStatistics) -> list[str]:
    published = PUBLISHED[kv].get(name)
    label = PARTS.get(name, "all but token states")
    return [f"{policy}, {kv}", label, format_number(published, 1), f"{share.mean:.1f}", f"{share.deviation:.1f}"]
