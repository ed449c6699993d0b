"""`chairlift simulate --calibrate`: measures FLOP/s, bandwidth and overheads of this CPU as a device to simulate."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch

from chairlift.config import EngineConfig
from chairlift.engine.startup.factory import build_engine
from chairlift.events import EventList, Step
from chairlift.lab.bench.driver import drive_all_at_once
from chairlift.lab.bench.machine import machine_facts
from chairlift.lab.sim.devices import Device
from chairlift.lab.workload.request import WorkloadRequest

ROWS = 512
SHAPES = ((2048, 2048), (5632, 2048), (2048, 5632))
"""Outputs and inputs of the measured matrices: the sizes in a model of about 1.1 billion weights."""

WEIGHT_BYTES = 256 << 20
"""Size of the matrix that is read from memory: larger than the caches."""

READ_INPUTS = 2048
"""Number of inputs of that matrix."""

DEPTHS = (2, 12)
"""Numbers of layers of the two tiny models whose steps are compared."""

NUM_STEPS = 200
"""Number of decode steps that are measured with each tiny model."""

REPEATS = 5
"""Number of repetitions of each product, of which the median counts."""


def calibrate(num_threads: int | None) -> tuple[Device, list[tuple[str, str]]]:
    """Measure this CPU in single precision.

    The measurements are speeds that a step reaches, so the efficiencies of the device are 1.

    Args:
        num_threads: number of torch threads; None uses all cores of the process.

    Returns:
        The device, and the measurements as (name, value with unit).
    """
    # A line through the steps of two tiny models gives the overheads.
    shallow, deep = (_tiny_step_seconds(num_threads, depth) for depth in DEPTHS)
    layer_overhead = max(0.0, (deep - shallow) / (DEPTHS[1] - DEPTHS[0]))
    step_overhead = max(0.0, shallow - DEPTHS[0] * layer_overhead)
    flops = {
        (outputs, inputs): 2 * ROWS * outputs * inputs / _linear_seconds(ROWS, outputs, inputs)
        for outputs, inputs in SHAPES
    }
    bandwidth = measure_bandwidth()
    facts = machine_facts()
    device = Device(
        name=facts.cpu,
        peak_flops=statistics.median(flops.values()),
        bandwidth=bandwidth,
        memory_bytes=facts.memory_bytes,
        source=f"measured, {facts.num_threads} threads, torch {facts.torch}, chairlift {facts.chairlift}",
        bytes_per_value=4,
        flops_efficiency=1.0,
        bandwidth_efficiency=1.0,
        step_overhead=step_overhead,
        layer_overhead=layer_overhead,
    )
    measured = [
        *((f"{ROWS} x {i} by {i} x {o}", f"{value / 1e9:.4g} GFLOP/s") for (o, i), value in flops.items()),
        (f"1 row by {WEIGHT_BYTES >> 20} MiB", f"{bandwidth / 1e9:.4g} GB/s"),
        ("step overhead", f"{step_overhead * 1e6:.4g} us"),
        ("layer overhead", f"{layer_overhead * 1e6:.4g} us"),
    ]
    return device, measured


def measure_bandwidth() -> float:
    """Measure the bytes per second at which a matrix of WEIGHT_BYTES is read from memory, as a decode step reads
    weights for one row."""
    outputs = WEIGHT_BYTES // 4 // READ_INPUTS
    return outputs * READ_INPUTS * 4 / _linear_seconds(1, outputs, READ_INPUTS)


def _linear_seconds(rows: int, outputs: int, inputs: int) -> float:
    """Measure the median time of a linear layer in single precision, after an unmeasured repetition."""
    values, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    samples = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        torch.nn.functional.linear(values, weight)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[1:])


def _tiny_step_seconds(num_threads: int | None, num_layers: int) -> float:
    """Measure the median time of a decode step of a tiny model in the engine."""
    log = EventList()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_tiny_config(num_layers)), encoding="utf-8")
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            num_kv_blocks=2 + NUM_STEPS // 16,
            num_threads=num_threads,
        )
        engine = build_engine(config, events=log)
        drive_all_at_once(engine, [WorkloadRequest("r0", 0.0, [1, 2, 3], NUM_STEPS)])
        engine.close()
    times = [event.time for event in log.events if isinstance(event, Step)]
    return statistics.median(later - earlier for earlier, later in pairwise(times))


def _tiny_config(num_layers: int) -> dict[str, object]:
    """The config.json of a Llama model with matrices of 64 by 64."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": NUM_STEPS + 16,
        "rms_norm_eps": 1e-5,
    }
