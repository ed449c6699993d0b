"""Measures the cost of structured outputs: microseconds of masks for each row, and the time of the step.

    python -m benchmarks.structured_cost [--model NAME] [--batch-size 8] [--max-tokens 96] [--num-threads N] [--json]

The model answers the same prompts without a structure and with several structures. "mask" is the time to accept the
last token and compute the next mask, and "apply" the time to mask the logits, both for each row over all steps.
"compile" is the first use of a structure, including its trial compilation in a separate process, and "again" a later
use. The script prints a table.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
from benchmarks.common import print_result
from rich.table import Column, Table

from chairlift import LLM, SamplingParams, StructuredOutputs
from chairlift.kernels.cpu.sampling import NativeSampling
from chairlift.worker.model_runner import ModelRunner
from chairlift.worker.token_masks import TokenMasks
from chairlift.worker.torch_sampling import TorchSampling

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "languages": {"type": "array", "items": {"enum": ["en", "de", "fr", "ja"]}, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 40},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "languages", "address"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 3, "maxItems": 3}
SUM = 'root ::= term ("+" term)*\nterm ::= [0-9]{1,4} | "(" root ")"'
STRUCTURES: dict[str, StructuredOutputs | None] = {
    "free": None,
    "JSON schema": StructuredOutputs(json=PERSON),
    "JSON schema, an array of them": StructuredOutputs(json=PEOPLE),
    "any JSON object": StructuredOutputs(json_object=True),
    "regular expression": StructuredOutputs(regex=r"([A-Z][a-z]{2,9} ){2,6}lives at [0-9]{1,3} [A-Z][a-z]+ Street\."),
    "choice": StructuredOutputs(choice=["yes", "no", "it depends"]),
    "grammar": StructuredOutputs(grammar=SUM),
}


@contextmanager
def record_times(calls: dict[str, list[tuple[float, int]]]) -> Iterator[None]:
    """Record the seconds and the number of rows of every call."""

    def timed(name: str, function: Any, rows: Any) -> Any:
        def call(*args: Any) -> Any:
            start = perf_counter()
            try:
                return function(*args)
            finally:
                calls[name].append((perf_counter() - start, rows(args)))

        return call

    methods = (
        ("mask", TokenMasks, "fill", lambda args: len(args[1])),
        ("apply", NativeSampling, "mask", lambda args: len(args[2])),
        ("apply", TorchSampling, "mask", lambda args: len(args[2])),
        ("step", ModelRunner, "submit", lambda args: len(args[1].num_scheduled_tokens)),
    )
    patches = [patch.object(owner, name, timed(key, getattr(owner, name), rows)) for key, owner, name, rows in methods]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def compile_milliseconds(llm: LLM, structure: StructuredOutputs) -> tuple[float, float]:
    """Measure the milliseconds of the first and the second use of a structure."""
    params = SamplingParams(structured_outputs=structure)
    times = []
    for _ in range(2):
        start = perf_counter()
        llm.engine.input_processor.constraints.compile(params)
        times.append(1e3 * (perf_counter() - start))
    return times[0], times[1]


def measure_costs(llm: LLM, structure: StructuredOutputs | None, batch_size: int, max_tokens: int) -> dict[str, float]:
    """Measure the microseconds of masks per row in the median step, and the milliseconds of compiling."""
    row = dict.fromkeys(("compile", "again"), 0.0)
    if structure is not None:
        row["compile"], row["again"] = compile_milliseconds(llm, structure)
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=max_tokens, structured_outputs=structure)
        for i in range(batch_size)
    ]
    messages = [[{"role": "user", "content": f"Invent person number {i}."}] for i in range(batch_size)]
    calls: dict[str, list[tuple[float, int]]] = defaultdict(list)
    with record_times(calls):
        outputs = llm.chat(messages, params, use_tqdm=False)
    row["tokens"] = sum(len(output.outputs[0].token_ids) for output in outputs)
    for name in ("mask", "apply"):
        values = np.array([1e6 * seconds / rows for seconds, rows in calls[name]] or [0.0])
        row[name], row[f"{name} p99"] = float(np.median(values)), float(np.quantile(values, 0.99))
        row[f"{name} mean"] = float(values.mean())
    decodes = [seconds for seconds, rows in calls["step"][1:] if rows]
    row["step"] = 1e6 * float(np.median(decodes))
    masks = sum(seconds for name in ("mask", "apply") for seconds, _ in calls[name])
    row["share"] = 100 * masks / sum(seconds for seconds, _ in calls["step"])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    sizes = {"num_kv_blocks": 64 * args.batch_size, "max_num_seqs": args.batch_size, "max_num_batched_tokens": 512}
    llm = LLM(args.model, **sizes, disable_hybrid_kv_cache_manager=True, num_threads=args.num_threads)
    # The first grammar of an engine also converts its tokenizer.
    start = perf_counter()
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="first"))
    llm.engine.input_processor.constraints.compile(params)
    first = 1e3 * (perf_counter() - start)
    rows = {
        name: measure_costs(llm, structure, args.batch_size, args.max_tokens) for name, structure in STRUCTURES.items()
    }
    columns = ("compile", "again", "mask", "mask p99", "apply", "step", "share")
    units = ("ms", "ms", "µs a row", "µs a row", "µs a row", "µs", "%")
    headers = (f"{column}, {unit}" for column, unit in zip(columns, units, strict=True))
    table = Table("", *(Column(header, justify="right") for header in headers))
    for name, row in rows.items():
        table.add_row(name, *(f"{row[column]:.2f}" for column in columns))
    line = f"the first grammar of all: {first:.0f} ms"
    print_result("structured_cost", vars(args), {"first_ms": first, "rows": rows}, [table, line], as_json=args.json)


if __name__ == "__main__":
    main()
