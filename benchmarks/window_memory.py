"""Compares the KV memory of a model with sliding windows, with and without the release of blocks that left a window.

    python -m benchmarks.window_memory [--model FOLDER] [--context 8192] [--output-len 64] [--memory 1GiB]
                                       [--quantization q8_0] [--json]

The model is a folder with config.json; its weights are random. Without --model it has the shape of Gemma 3 270M: 15
layers with a window of 512 tokens, and 3 that attend to all tokens. One request of `context` tokens runs alone, once
with --disable-hybrid-kv-cache-manager. The script prints its KV memory as planned and as measured, the number of such
requests that the given KV memory holds, as planned and as found by running them through the scheduler in virtual time,
and whether the tokens are the same.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.common import print_result
from rich.table import Table

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.core.factory import make_kv_cache_manager
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.engine.startup.pool_capacity import RequestLengths, compute_pool_capacity, forced_request
from chairlift.engine.startup.pool_plan import planned_pool
from chairlift.events import EventList, RequestWaiting, Step
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.synthetic import make_workload
from chairlift.system.memory_amounts import format_memory, parse_memory

GEMMA_3_270M: Final[dict[str, Any]] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


FIT_PROMPT: Final = 16
"""Prompt tokens of the requests that are counted; the rest of the context is their output."""


@dataclass(frozen=True, slots=True)
class WindowMemory:
    """The KV memory of requests of one length.

    Attributes:
        planned_bytes, held_bytes: bytes of K and V of one request at its last token.
        most_bytes, peak_bytes: the maximum until then, as planned and measured. Chunks of the prompt determine it.
        planned_requests: requests of this length that the memory holds.
        run_requests: of that number and one more, the larger one that the scheduler runs at the same time without a
            wait for memory or a preemption; 0 if it runs neither.
    """

    planned_bytes: int
    held_bytes: int
    most_bytes: int
    peak_bytes: int
    planned_requests: int
    run_requests: int
    token_ids: list[int]


class ConstantCost:
    """Every step takes one second of virtual time."""

    def seconds(self, shape: StepShape) -> float:
        return 1.0


def measure(config: EngineConfig, lengths: RequestLengths) -> WindowMemory:
    """Plan the memory of requests of these lengths, and run one of them on an engine."""
    events = EventList()
    engine = build_engine(config, events=events)
    plan, limits = engine.facts.kv_cache_plan, engine.facts.scheduler_config
    pool = planned_pool(config, engine.facts.model_config.max_position_embeddings, plan)
    fit = compute_pool_capacity(pool, limits, repeat(lengths))
    context = lengths.prompt + lengths.output
    full = RequestLengths(FIT_PROMPT, context - FIT_PROMPT, context - FIT_PROMPT)
    num_fit = compute_pool_capacity(pool, limits, repeat(full)).num_fit
    if not fit.num_fit:
        raise SystemExit(f"--memory holds no request of this length: {fit.error}")
    token_ids = run_alone(engine, lengths)
    held = [plan.num_blocks - event.free_blocks for event in events.events if isinstance(event, Step)]
    sim = SimConfig(limits, pool, enable_prefix_caching=False)
    counts = [count for count in (num_fit, num_fit + 1) if runs_undisturbed(sim, full, count)]
    return WindowMemory(
        planned_bytes=fit.num_slots_held // fit.num_fit * (plan.block_bytes // plan.block_size),
        held_bytes=held[-1] * plan.block_bytes,
        most_bytes=make_kv_cache_manager(pool).worst_case_blocks(forced_request(0, lengths)) * plan.block_bytes,
        peak_bytes=max(held) * plan.block_bytes,
        planned_requests=num_fit,
        run_requests=max(counts, default=0),
        token_ids=token_ids,
    )


def run_alone(engine: Engine, lengths: RequestLengths) -> list[int]:
    """The greedy tokens of a request with a random prompt."""
    draw = random.Random(0)
    prompt = [draw.randrange(engine.facts.model_config.vocab_size) for _ in range(lengths.prompt)]
    params = SamplingParams(temperature=0, max_tokens=lengths.output, ignore_eos=True)
    return LLM(engine=engine).generate(prompt, params)[0].outputs[0].token_ids


def runs_undisturbed(config: SimConfig, lengths: RequestLengths, count: int) -> bool:
    """Whether the scheduler runs so many requests without a wait for memory or a preemption. One step computes all
    prompts, so that all requests reach their full length at the same time."""
    events = EventList()
    budget = max(config.scheduler.max_num_batched_tokens, count * lengths.prompt)
    limits = replace(config.scheduler, max_num_seqs=count, max_num_batched_tokens=budget)
    fixed = parse_lengths(f"fixed:{lengths.prompt}"), parse_lengths(f"fixed:{lengths.output}")
    workload = make_workload(0, count, *fixed, ArrivalProcess(None), 1 << 15)
    simulate(workload, replace(config, scheduler=limits), ConstantCost(), events)
    waits = [event for event in events.events if isinstance(event, RequestWaiting) and event.reason != "seats"]
    return not waits and not any(event.preempted for event in events.events if isinstance(event, Step))


def engine_config(model: Path, args: argparse.Namespace, *, releases: bool) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        quantization=args.quantization,
        max_model_len=args.context,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_memory_bytes=parse_memory(args.memory, "memory"),
        enable_prefix_caching=False,
        disable_hybrid_kv_cache_manager=not releases,
    )


def compare(model: Path, args: argparse.Namespace) -> dict[str, WindowMemory]:
    """The memory with windows kept and with windows released."""
    lengths = RequestLengths(args.context - args.output_len, args.output_len, args.output_len)
    return {
        name: measure(engine_config(model, args, releases=name == "released"), lengths) for name in ("kept", "released")
    }


def print_comparison(results: dict[str, WindowMemory], args: argparse.Namespace) -> None:
    table = Table(title=f"KV memory of a request of {args.context:,} tokens", title_justify="left")
    for column in (
        "windows",
        "at its last token",
        "planned",
        "at most",
        "planned at most",
        f"requests in {args.memory}",
    ):
        table.add_column(column, justify="left" if column == "windows" else "right")
    for name, result in results.items():
        sizes = (result.held_bytes, result.planned_bytes, result.peak_bytes, result.most_bytes)
        requests = f"{result.run_requests} (planned: {result.planned_requests})"
        table.add_row(name, *map(format_memory, sizes), requests)
    values = {name: asdict(result) for name, result in results.items()}
    has_same_tokens = values["kept"].pop("token_ids") == values["released"].pop("token_ids")
    line = f"the tokens are {'the same' if has_same_tokens else 'DIFFERENT'}"
    record = {**values, "same_tokens": has_same_tokens}
    print_result("window_memory", vars(args), record, [table, line], as_json=args.json)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder with config.json; default: the shape of Gemma 3 270M")
    parser.add_argument("--context", type=int, default=8192, help="tokens of the prompt and the output")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of the output")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512, help="the token budget of a step")
    parser.add_argument("--memory", default="1GiB", help="KV memory for the number of requests that fit")
    parser.add_argument("--quantization", help="as for chairlift serve")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser.parse_args(words)


def main() -> None:
    args = parse_arguments()
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(GEMMA_3_270M))
        print_comparison(compare(args.model or Path(folder), args), args)


if __name__ == "__main__":
    main()
