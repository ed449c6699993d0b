"""Writes the page about the choice of a model: `python -m docs.choose_model > docs/guide/choose-a-model.md`.

Every number is planned as by `chairlift plan`: nothing is downloaded or measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from chairlift.config import EngineConfig
from chairlift.engine.startup.memory_plan import plan_memory
from chairlift.engine.startup.required_memory import SERVER_PROCESSES_BYTES
from chairlift.kernels.kernel_memory import total
from chairlift.kernels.weight_formats import SUPER_BLOCK
from chairlift.lab.planning.planner import PlannedModel, planned_shape
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.devices import Device
from chairlift.lab.sim.roofline import Roofline
from chairlift.models.declaration.matrix_spec import EMBEDDING, ROUTER, MatrixSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.registry import read_hf_config

CONFIGS: Final = Path(__file__).parents[1] / "tests" / "data" / "published_configs.jsonl"

NUM_SEQS: Final = 20
CONTEXT: Final = 4096
"""Tokens of each conversation at its end."""

LARGE_POOL: Final = 1 << 50
"""A pool of this size in bytes is limited by what the conversations need."""

MODELS: Final = {
    "SmolLM2 135M (the default)": ("SmolLM2-135M", "Q4_1"),
    "Qwen3 0.6B": ("Qwen3-0.6B", "Q4_K_M"),
    "Gemma 3 1B": ("gemma-3-1b-it", "Q4_K_M"),
    "Llama 3.2 1B": ("Llama-3.2-1B-Instruct", "Q4_K_M"),
    "SmolLM2 1.7B": ("SmolLM2-1.7B-Instruct", "Q4_K_M"),
    "Granite 3.3 2B": ("granite-3.3-2b-instruct", "Q4_K_M"),
    "SmolLM3 3B": ("SmolLM3-3B", "Q4_K_M"),
    "Phi-4-mini 3.8B": ("Phi-4-mini-instruct", "Q4_K_M"),
    "Gemma 3 4B": ("gemma-3-4b-it", "Q4_K_M"),
    "Llama 3.1 8B": ("Llama-3.1-8B-Instruct", "Q4_K_M"),
    "Qwen3 8B": ("Qwen3-8B-Base", "Q4_K_M"),
    "Phi-4 14B": ("phi-4", "Q4_K_M"),
    "Qwen3 30B-A3B": ("Qwen3-30B-A3B", "Q4_K_M"),
}
"""Model -> its published configuration, and the format of its GGUF file."""

SMALL_BLOCKS: Final = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""The formats that llama.cpp takes for rows that are not a multiple of SUPER_BLOCK."""

MEASURED_OPS, MEASURED_BANDWIDTH = 944e9, 28e9
"""8-bit operations and bytes from memory per second on two cores, as in docs/performance.md (Zen 4)."""

DESKTOP_BANDWIDTH: Final = 0.8 * 2 * 5600e6 * 8
"""80 % of two channels of DDR5-5600."""


def machine(num_cores: int, bandwidth: float) -> Device:
    """A machine whose cores compute like the measured ones."""
    ops = MEASURED_OPS * num_cores / 2
    return Device(f"{num_cores} cores", ops, bandwidth, 1, "docs/performance.md", bytes_per_value=1)


MACHINES: Final = (
    machine(2, MEASURED_BANDWIDTH),
    machine(8, min(4 * MEASURED_BANDWIDTH, DESKTOP_BANDWIDTH)),
    machine(16, 8 * MEASURED_BANDWIDTH),
)

INTRODUCTION: Final = f"""# Choose a model

The memory and the speed of models for {NUM_SEQS} conversations at the same time, each of {CONTEXT:,} tokens. This page
is written by `python -m docs.choose_model` from the published configurations of the models, with the plan of memory and
the cost model of [`chairlift plan`](laboratory.md#plan-memory-and-speed).

```
chairlift plan Qwen/Qwen3-0.6B --max-num-seqs {NUM_SEQS} --max-model-len {CONTEXT} --memory 12GiB
```

plans another model or another number of requests.
"""

NOTES: Final = f"""
## What the numbers mean

**File** is the size of the matrices in a GGUF file. **RAM** is the whole server: its two processes, weights, the largest step, and K and V of {NUM_SEQS}
times {CONTEXT:,} tokens in bfloat16, which `--kv-cache-dtype int8` halves. Fewer or shorter conversations need less.

**Tokens/s** are predicted for decoding in the middle of the context, without prompts. The machine with 2 cores is the one of
[performance](../performance.md#a-cpu-with-avx-512-bf16-zen-4): {MEASURED_OPS / 1e9:.0f} GOP/s of 8-bit products and {MEASURED_BANDWIDTH / 1e9:.0f} GB/s of memory, of which a step reaches
{MACHINES[0].flops_efficiency:.0%} and {MACHINES[0].bandwidth_efficiency:.0%}. More cores are assumed to compute in proportion; 8 cores read {MACHINES[1].bandwidth / 1e9:.0f} GB/s (80 % of two channels of DDR5-5600), and
16 cores of a server {MACHINES[2].bandwidth / 1e9:.0f} GB/s. Layers with a sliding window (Gemma) count as if they had none. CPUs without AVX-512 VNNI are slower, and
shared machines vary: measure yours with `chairlift bench latency`.
"""  # noqa: E501 - the lines of the page


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """The numbers of one model.

    Attributes:
        file_bytes: size of the matrices in the file.
        memory_bytes: memory of a server with NUM_SEQS conversations of CONTEXT tokens.
        speeds: output tokens per second of all conversations together, and of one that is alone, for each machine.
    """

    name: str
    file_format: str
    file_bytes: int
    memory_bytes: int
    speeds: list[tuple[float, float]]


def uses_more_bits(layer: int, num_layers: int) -> bool:
    """Whether Q4_K_M of llama.cpp stores some matrices of a layer in Q6_K: in its first and last eighth, and in every
    third layer between them."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def matrix_format(matrix: MatrixSpec, name: str, config: ModelConfig, file_format: str) -> str:
    """The format that llama.cpp gives to a matrix of a file."""
    is_head = matrix.group == EMBEDDING if config.tie_word_embeddings else name == config.head.parts[0][0]
    if matrix.group == ROUTER:
        return "f32"
    if file_format == "Q4_1":
        return "q8_0" if is_head else "q4_1"
    found = re.search(r"layers\.(\d+)\..*(?:\.v_proj|down_proj)", name)
    has_more = found is not None and uses_more_bits(int(found[1]), config.num_layers)
    chosen = "q6_k" if is_head or has_more else "q5_k" if "qkv_proj" in name else "q4_k"
    return chosen if matrix.in_features % SUPER_BLOCK == 0 else SMALL_BLOCKS[chosen]


def row_bytes(name: str, in_features: int) -> int:
    """Bytes of a row of a matrix in a file."""
    num_inputs, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
    return in_features // num_inputs * num_bytes


def planned_row(config: ModelConfig, name: str, file_format: str) -> PlannedRow:
    """Plan the server of a model, and predict its speed on each machine."""
    named = [(matrix, part, out) for matrix in config.matrices for part, out in matrix.parts]
    formats = {f"{part}.weight": matrix_format(matrix, part, config, file_format) for matrix, part, _ in named}
    file_bytes = sum(out * row_bytes(formats[f"{part}.weight"], matrix.in_features) for matrix, part, out in named)
    options = EngineConfig(
        kernels="native", max_num_seqs=NUM_SEQS, max_model_len=CONTEXT, kv_cache_memory_bytes=LARGE_POOL
    )
    memory = plan_memory(options, config, formats.__getitem__, None)
    assert memory.pool.limited_by == "demand", "the pool has room for all conversations"
    parts = total(memory.weights), total(memory.activations), memory.pool.num_bytes, SERVER_PROCESSES_BYTES
    shape = planned_shape(PlannedModel(name, name, config, formats.__getitem__), memory, "cpu")
    speeds = [speeds_on(Roofline(shape, each)) for each in MACHINES]
    return PlannedRow(name, file_format, int(file_bytes), sum(parts), speeds)


def speeds_on(cost: Roofline) -> tuple[float, float]:
    """Output tokens per second of all conversations in the middle of their context, and of a single one."""
    together, alone = (
        num_seqs / cost.seconds(StepShape(num_seqs, num_seqs, num_seqs, *[num_seqs * CONTEXT // 2] * 2))
        for num_seqs in (NUM_SEQS, 1)
    )
    return together, alone


def rows() -> list[PlannedRow]:
    """The numbers of all models."""
    published = {each.pop("name"): each for each in map(json.loads, CONFIGS.read_text("utf-8").splitlines())}
    return [
        planned_row(read_hf_config(published[source], source=source), name, file_format)
        for name, (source, file_format) in MODELS.items()
    ]


def gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"


def speed(tokens_per_second: float) -> str:
    if tokens_per_second < 10:
        return f"{tokens_per_second:.1f}"
    return f"{round(tokens_per_second, -1 if tokens_per_second >= 100 else None):.0f}"


def page() -> str:
    """The page of the documentation."""
    planned = rows()
    lines = [*memory_lines(planned), *speed_lines(planned, 0), *speed_lines(planned, 1)]
    return INTRODUCTION + "\n".join(lines) + "\n" + NOTES


def memory_lines(planned: list[PlannedRow]) -> Iterator[str]:
    yield from ("", "## Memory", "", "| model | format | file | RAM of the server |", "|---|---|---:|---:|")
    for row in planned:
        yield f"| {row.name} | {row.file_format} | {gigabytes(row.file_bytes)} | {gigabytes(row.memory_bytes)} |"


def speed_lines(planned: list[PlannedRow], column: int) -> Iterator[str]:
    title = (f"Tokens/s of {NUM_SEQS} conversations together", "Tokens/s of one conversation alone")[column]
    names = " | ".join(each.name for each in MACHINES)
    yield from ("", f"## {title}", "", f"| model | {names} |", f"|---|{'---:|' * len(MACHINES)}")
    for row in planned:
        yield f"| {row.name} | {' | '.join(speed(each[column]) for each in row.speeds)} |"


if __name__ == "__main__":
    print(page(), end="")
