"""Figure 16 of the PagedAttention paper: throughput where all prompts begin alike."""

from __future__ import annotations

from typing import Any, Final

from chairlift.lab.presets import Preset, PresetOptions, PresetResult, Table
from chairlift.lab.presets.vllm_setting import POLICIES, constants, cost_model, sim_config
from chairlift.lab.presets.vllm_steady import NUM_SEEDS, Spread, Steady, SteadyTally
from chairlift.lab.sim.published_models import model_shape
from chairlift.lab.sim.simulator import simulate
from chairlift.lab.workload.arrivals import BurstArrivals
from chairlift.lab.workload.lengths import FixedLength, parse_lengths
from chairlift.lab.workload.synthetic import shared_prefixes

MODEL: Final = "llama-13b"

SENTENCE: Final = "lognormal:26,0.5,4..256"
TRANSLATION: Final = "lognormal:38,0.5,4..256"
"""Tokens of an English sentence and of its German translation: free constants. The WMT16 test sentences have some 21
words on average, for which LLaMA's tokenizer needs roughly 1.4 tokens each in English and 2 in German."""

NUM_PROMPTS: Final = 3000

PUBLISHED: Final = {80: 1.67, 341: 3.58}
"""Tokens of the shared prefix -> throughput of vLLM over that of Orca (Oracle)."""

KINDS: Final = ("oracle", "paged")

NOTES: Final = [
    "The paper reads throughput off curves of latency by rate. Ours is what is ended a second with a queue that is "
    "never empty: over a long trace, the highest rate at which the latency does not grow.",
    "Two things grow with the prefix: Oracle holds it for every request and computes it for every request. Paging does "
    "both once. Whole blocks are shared: 80 tokens are 5 blocks, 341 are 21, and 5 tokens besides.",
    "Lengths of sentences were not published, and the ratio depends on them: the shorter sentence and translation are, "
    "the more of a request is its prefix. The KV memory is that of OPT-13B, whose K and V are as large.",
    "Ours is above the paper's, most of all behind the short prefix, where hundreds of short requests run at once "
    "under paging: the cost model charges a step nothing for each of them but its tokens, and takes the "
    "paged attention kernel, which the paper measures as 20 to 26 % slower, for as fast as another.",
]


def run(options: PresetOptions) -> PresetResult:
    """Both prefixes, paging with a prefix cache against Oracle, saturated, several seeds."""
    seed, count = options.workload_seed or 0, options.num_prompts or NUM_PROMPTS
    rows: list[list[str]] = []
    ours: dict[str, Any] = {}
    for prefix, published in PUBLISHED.items():
        runs = {kv: [translate(kv, prefix, seed + i, count) for i in range(NUM_SEEDS)] for kv in KINDS}
        rates = {kv: Spread.of([run.requests_per_s for run in runs[kv]]) for kv in KINDS}
        batches = {kv: Spread.of([run.batch for run in runs[kv]]).mean for kv in KINDS}
        times = rates["paged"].mean / rates["oracle"].mean
        for kv in KINDS:
            numbers = [f"{batches[kv]:.1f}", f"{rates[kv].mean:.1f}", f"{rates[kv].off:.1f}"]
            ratios = [f"{published:.2f}", f"{times:.2f}"] if kv == "paged" else ["1", "1"]
            rows.append([f"{prefix} tokens, {POLICIES[kv]}", *numbers, *ratios])
        ours[str(prefix)] = {
            "ratio": round(times, 2),
            "requests_per_s": {kv: round(rates[kv].mean, 2) for kv in KINDS},
            "batch": {kv: round(batch, 2) for kv, batch in batches.items()},
        }
    columns = ["prefix, system", "batch", "requests/s", "seeds, +-", "throughput, published", "ours"]
    return PresetResult(
        constants=[
            ("requests", f"{count:,} at once, seeds {seed} to {seed + NUM_SEEDS - 1}"),
            ("counted", "steps from the admission of the first tenth of them until all but the last are admitted"),
            ("sentence, translation", f"{SENTENCE}; {TRANSLATION} (free constants)"),
            *(constant for constant in constants(MODEL) if constant[0] != "lengths"),
        ],
        tables=[Table("Translations behind a shared prefix", columns, rows)],
        notes=NOTES,
        published={str(prefix): {"ratio": number} for prefix, number in PUBLISHED.items()},
        ours=ours,
    )


def translate(kv: str, prefix: int, seed: int, count: int) -> Steady:
    """`count` translations at once behind one prefix of that many tokens."""
    sentence, translation = parse_lengths(SENTENCE), parse_lengths(TRANSLATION)
    vocab_size = model_shape(MODEL).vocab_size
    requests = shared_prefixes(seed, count, 1, FixedLength(prefix), sentence, translation, BurstArrivals(), vocab_size)
    tally = SteadyTally(count)
    config = sim_config(kv, enable_prefix_caching=kv == "paged", model=MODEL)
    simulate(requests, config, cost_model(MODEL), tally)
    return tally.result()


PRESET = Preset(
    name="vllm-fig16",
    title="Throughput behind a shared prefix, LLaMA-13B, translation",
    source="Kwon et al., SOSP'23, Figure 16 and section 6.4",
    run=run,
    takes=frozenset({"workload_seed", "num_prompts"}),
)
