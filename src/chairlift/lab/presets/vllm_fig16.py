"""Figure 16 of the PagedAttention paper: throughput of prompts with a shared prefix."""

from __future__ import annotations

from typing import Any, Final

from chairlift.lab.presets import PresetOptions, PresetResult, Table
from chairlift.lab.presets import vllm_experiments as vllm
from chairlift.lab.sim.published_models import model_shape
from chairlift.lab.sim.simulator import simulate
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import FixedLength, parse_lengths
from chairlift.lab.workload.synthetic import shared_prefixes

MODEL: Final = "llama-13b"

SENTENCE: Final = "lognormal:26,0.5,4..256"
TRANSLATION: Final = "lognormal:38,0.5,4..256"
"""Tokens of an English sentence and of its German translation: free constants. The WMT16 test sentences have about 21
words on average, of about 1.4 tokens each in English and 2 in German with LLaMA's tokenizer."""

NUM_PROMPTS: Final = 3000

PUBLISHED: Final = {80: 1.67, 341: 3.58}
"""By tokens of the shared prefix: the throughput of vLLM divided by that of Orca (Oracle)."""

COMPARED: Final = ("oracle", "paged")

NOTES: Final = [
    "The paper reads throughput from curves of latency by rate. Ours is the number of requests finished per second "
    "with a queue that is never empty: over a long trace, the highest rate at which the latency does not grow.",
    "Oracle stores and computes the prefix for every request, and paging only once, so the ratio grows with the "
    "prefix. Full blocks are shared: 80 tokens are 5 blocks, and 341 tokens are 21 blocks and 5 tokens.",
    "The lengths of sentences were not published, and the ratio depends on them: the shorter sentence and translation "
    "are, the larger is the prefix's share. The KV memory is that of OPT-13B, whose K and V have the same size.",
    "Ours is above the paper's, especially for the short prefix, where hundreds of short requests run together under "
    "paging: a request costs a step nothing but its tokens in the cost model, and the paged attention kernel, which "
    "the paper measures as 20 to 26 % slower, is as fast as any other.",
]


def run(options: PresetOptions) -> PresetResult:
    """Simulates both prefixes under paging with a prefix cache and under Oracle, saturated, with several seeds."""
    seed, count = options.workload_seed or 0, options.num_prompts or NUM_PROMPTS
    rows: list[list[str]] = []
    ours: dict[str, Any] = {}
    for prefix, published in PUBLISHED.items():
        runs = {kv: [run_translations(kv, prefix, seed + i, count) for i in range(vllm.NUM_SEEDS)] for kv in COMPARED}
        rates = {kv: vllm.SeedStatistics.from_values([run.requests_per_s for run in runs[kv]]) for kv in COMPARED}
        batches = {kv: sum(run.batch for run in runs[kv]) / vllm.NUM_SEEDS for kv in COMPARED}
        ratio = rates["paged"].mean / rates["oracle"].mean
        for kv in COMPARED:
            numbers = [f"{batches[kv]:.1f}", f"{rates[kv].mean:.1f}", f"{rates[kv].deviation:.1f}"]
            ratios = [f"{published:.2f}", f"{ratio:.2f}"] if kv == "paged" else ["1", "1"]
            rows.append([f"{prefix} tokens, {vllm.POLICIES[kv]}", *numbers, *ratios])
        ours[str(prefix)] = {
            "ratio": round(ratio, 2),
            "requests_per_s": {kv: round(rates[kv].mean, 2) for kv in COMPARED},
            "batch": {kv: round(batch, 2) for kv, batch in batches.items()},
        }
    columns = ["prefix, system", "batch", "requests/s", "seeds, +-", "throughput, published", "ours"]
    return PresetResult(
        constants=[
            ("requests", f"{count:,} at once, seeds {seed} to {seed + vllm.NUM_SEEDS - 1}"),
            vllm.COUNTED,
            ("sentence, translation", f"{SENTENCE}; {TRANSLATION} (free constants)"),
            *(constant for constant in vllm.constants(MODEL) if constant[0] != "lengths"),
        ],
        tables=[Table("Translations with a shared prefix", columns, rows)],
        notes=NOTES,
        published={str(prefix): {"ratio": number} for prefix, number in PUBLISHED.items()},
        ours=ours,
    )


def run_translations(kv: str, prefix: int, seed: int, count: int) -> vllm.SteadyState:
    """Simulates `count` translations at once after a shared prefix of `prefix` tokens."""
    sentence, translation = parse_lengths(SENTENCE), parse_lengths(TRANSLATION)
    vocab_size = model_shape(MODEL).vocab_size
    requests = shared_prefixes(seed, count, 1, FixedLength(prefix), sentence, translation, ArrivalProcess(), vocab_size)
    tally = vllm.SteadyStateTally(count)
    config = vllm.sim_config(kv, enable_prefix_caching=kv == "paged", model=MODEL)
    simulate(requests, config, vllm.cost_model(MODEL), tally)
    return tally.result()
