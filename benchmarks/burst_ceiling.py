"""Measures which share of the CPU's ceiling a whole burst of requests reaches.

    python -m benchmarks.burst_ceiling [--model PATH] [--quantization int8] [--num-prompts 64] [--input-len SPEC]
                                       [--output-len SPEC] [--rounds 3] [--json]

The ceiling is the time in which the CPU computes the products of the burst at the speeds that are measured immediately
before each run: those of linear layers for each token, of the LM head for each output token, and of attention for each
pair of a token and one that it sees. Reading weights in each step, softmax, norms and the scheduler are not part of it,
so a share of 1 cannot be reached. Models with experts are rejected.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial

from benchmarks.common import print_result, spread
from benchmarks.kernels import ISA_UNITS, CeilingMeter, KernelWork, native_parts, unit_of
from benchmarks.products import Product, head_product, layer_products
from rich.table import Table

from chairlift.config import EngineConfig
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.engine.startup.weight_plan import MatrixFormats
from chairlift.errors import ConfigError
from chairlift.events import EventList
from chairlift.kernels.cpu import native
from chairlift.lab.bench.bench_options import ThroughputOptions
from chairlift.lab.bench.driver import drive_all_at_once, run_forced
from chairlift.lab.metrics.run import summarize
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.loading.resolve import resolve_model
from chairlift.models.declaration.model_config import ModelConfig

MANY_ROWS = 64
"""Rows of a step, which decide the operation of a product where an instruction set has several."""


def burst_work(
    model: ModelConfig, found: MatrixFormats, quantization: str | None, workload: Sequence[WorkloadRequest]
) -> KernelWork:
    """The products of all tokens of a workload. The last output token of a request is not computed again."""
    computed = [len(item.prompt_token_ids) + item.output_len - 1 for item in workload]
    operations: Counter[str] = Counter()
    unit = ISA_UNITS.get(native.isa(), {}).get("bf16", "fma")

    def add(product: Product, num_tokens: int) -> None:
        spec = product.matrix
        for weight_format, out in native_parts(spec, found, quantization):
            operations[unit_of(weight_format, native.isa(), MANY_ROWS)] += 2 * out * spec.in_features * num_tokens

    for layer in model.layers:
        for product in layer_products(layer):
            add(product, sum(computed))
        if (spec := layer.attention) is not None:
            window = spec.sliding_window or max(computed)
            pairs = sum(min(position + 1, window) for num_tokens in computed for position in range(num_tokens))
            operations[unit] += 4 * spec.query_size * pairs
    add(head_product(model), sum(item.output_len for item in workload))
    return KernelWork(dict(operations))


def run_burst(engine: Engine, log: EventList, workload: Sequence[WorkloadRequest]) -> float:
    """Run all requests at once. Returns the seconds."""
    run_forced(engine, log, workload, None)
    return summarize(log.events).duration


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """The share of the ceiling and the output tokens/s of each round.

    Raises:
        ConfigError: the model has experts or cannot be served, or a request does not fit.
    """
    source = resolve_model(args.model)
    model = source.config()
    if any(layer.mixture is not None for layer in model.layers):
        raise ConfigError(f"{model.name} is a mixture of experts, whose products depend on the tokens of a step")
    lengths = {name: value for name in ("input_len", "output_len") if (value := getattr(args, name))}
    options = ThroughputOptions(num_prompts=args.num_prompts, **lengths)
    log = EventList()
    config = EngineConfig(model=args.model, quantization=args.quantization, kernels="native", skip_tokenizer_init=True)
    engine = build_engine(config, events=log)
    make = partial(options.workload, model.vocab_size)
    meter, results = CeilingMeter(), dict[str, list[float]](share=[], tokens_per_s=[])
    try:
        drive_all_at_once(engine, make(0)[: options.num_warmups])
        for number in range(1, args.rounds + 1):
            workload = make(number)
            speeds = meter.sample()
            seconds = run_burst(engine, log, workload)
            least, _ = burst_work(model, source.formats(model), args.quantization, workload).least_seconds(speeds)
            results["share"].append(least / seconds)
            results["tokens_per_s"].append(sum(item.output_len for item in workload) / seconds)
    finally:
        engine.close()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=".gguf file or folder; default: the default model")
    parser.add_argument("--quantization")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", help="distribution of prompt lengths, as in chairlift bench throughput")
    parser.add_argument("--output-len", help="distribution of output lengths")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    results = measure(args)
    table = Table("", "median (least to most)", title="a whole burst")
    table.add_row("output tokens/s", spread(results["tokens_per_s"]))
    table.add_row("share of the ceiling, %", spread([100 * share for share in results["share"]]))
    print_result("burst_ceiling", vars(args), results, [table], as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
