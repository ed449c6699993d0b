"""Figure 2 of the PagedAttention paper: where the KV memory goes, by policy."""

from __future__ import annotations

from typing import Final

from chairlift.lab.presets import Preset, PresetOptions, PresetResult, Table
from chairlift.lab.presets.vllm_setting import POLICIES, Load, constants
from chairlift.lab.presets.vllm_steady import NUM_SEEDS, Spread, Steady, steady_state

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
"""Percent of the KV memory. Of vLLM's waste only the sum is in the figure."""

NOTES: Final = [
    "Means over the steps of a saturated queue, every step counting alike. The lengths' means are the paper's, but "
    "which prompt belonged to which output was not published; independent draws take its place.",
    "Reserved and internal are split by the true output length, as in the paper: reserved will be written, internal "
    "never. Every reservation here is in whole blocks of 16 slots, so up to 15 slots a request that the paper, whose "
    "Orca has no blocks, sees as rounding by the buddy allocator (external) are internal here. Hence the few tenths "
    "under Oracle, where the paper has none, and somewhat more internal and less external under Pow2.",
    "External holds what the buddy allocator rounds up, and every free slot while the head of the queue is refused for "
    "memory. Under Max that is what 7 x 2048 slots leave over.",
    "A token that is sampled last never gets K and V: a request is held to prompt + output - 1 slots.",
]


def part(run: Steady, name: str) -> float:
    """A part of the figure in percent. Free slots are with the others: there are hardly any under saturation."""
    if name == "external":
        return run.shares["external"] + run.shares["free"]
    if name == "waste":
        return 100 - run.shares["token_states"]
    return run.shares[name]


def run(options: PresetOptions) -> PresetResult:
    """ShareGPT lengths, all requests at once, under each policy and several seeds."""
    seed, count = options.workload_seed or 0, options.num_prompts or NUM_PROMPTS
    loads = [Load.draw("sharegpt", seed + i, count) for i in range(NUM_SEEDS)]
    rows, ours = [], {}
    for kv, policy in POLICIES.items():
        runs = [steady_state(kv, load) for load in loads]
        names = [*PARTS, "waste"] if "waste" in PUBLISHED[kv] else [*PARTS]
        spreads = {name: Spread.of([part(steady, name) for steady in runs]) for name in names}
        ours[kv] = {name: round(spread.mean, 2) for name, spread in spreads.items()}
        rows += [_row(policy, kv, name, spread) for name, spread in spreads.items()]
    columns = ["policy", "slots", "published, %", "ours, %", "seeds, +-"]
    return PresetResult(
        constants=[
            ("requests", f"{count:,} at once, ShareGPT lengths, seeds {seed} to {seed + NUM_SEEDS - 1}"),
            ("counted", "steps from the admission of the first tenth of them until all but the last are admitted"),
            *constants(),
        ],
        tables=[Table("Slots of the KV memory by what is in them", columns, rows)],
        notes=NOTES,
        published=dict(PUBLISHED),
        ours=ours,
    )


def _row(policy: str, kv: str, name: str, spread: Spread) -> list[str]:
    published = PUBLISHED[kv].get(name)
    label = PARTS.get(name, "all but token states")
    shown = "-" if published is None else f"{published:.1f}"
    return [f"{policy}, {kv}", label, shown, f"{spread.mean:.1f}", f"{spread.off:.1f}"]


PRESET = Preset(
    name="vllm-fig2",
    title="KV memory by what is in it, OPT-13B, ShareGPT",
    source="Kwon et al., SOSP'23, Figure 2",
    run=run,
    takes=frozenset({"workload_seed", "num_prompts"}),
)
