"""`bench kernels` on tiny random models: its arithmetic, and the kernels that it measures."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.kernels.cpu import load
from chairlift.kernels.cpu.formats import matrix_bytes
from chairlift.kernels.cpu.tape import MAX_ROWS
from chairlift.kernels.registry import get_kernels
from chairlift.lab.bench.kernels.benchmark import KernelOptions, KernelResult, _Measurement, run_kernels
from chairlift.lab.bench.kernels.ceilings import CeilingMeter, Ceilings, KernelWork, combine_ceilings
from chairlift.lab.bench.kernels.passes import LAYERS, AttentionPass, LinearPass, RecurrencePass, _metadata
from chairlift.lab.bench.kernels.tables import print_kernels
from chairlift.loading.resolve import load_config, resolve_model
from chairlift.models import decoder
from chairlift.models.declaration import LM_HEAD, MatrixSpec, ModelConfig
from chairlift.models.decoder import build_model
from chairlift.models.random_weights import RandomWeights
from command_runner import invoke
from native import needs_native

TinyModel = Callable[..., Path]
SPEEDS = {"dot_u8s8": 100.0, "dot_u7s8": 200.0, "fma": 50.0, "read": 10.0}
CEILINGS = Ceilings("avx2", 2, SPEEDS)
OPTIONS = KernelOptions(rows=(1, 9), batch_sizes=(1, 3), contexts=(20, 64), repeats=2, ceiling_seconds=0.01)


def model_config(folder: Path) -> ModelConfig:
    return load_config(resolve_model(str(folder)))


def faster(**speeds: float) -> Ceilings:
    return replace(CEILINGS, speeds=SPEEDS | speeds)


# -- arithmetic ----------------------------------------------------------------------------------------------------


def test_the_slower_of_compute_and_memory_is_the_ceiling() -> None:
    assert CEILINGS.least_seconds(KernelWork({"dot_u8s8": 50.0, "dot_u7s8": 100.0}, 5.0)) == (1.0, "compute")
    assert CEILINGS.least_seconds(KernelWork({"fma": 50.0}, 20.0)) == (2.0, "memory")
    assert CEILINGS.least_seconds(KernelWork({"fma": 25.0}, 20.0, in_cache=True)) == (0.5, "compute")
    assert CEILINGS.least_seconds(KernelWork(num_bytes=20.0, in_cache=True)) is None


def test_the_best_of_two_measurements_has_the_higher_values() -> None:
    other = faster(dot_u8s8=90.0, dot_u7s8=210.0, read=11.0)
    best = combine_ceilings([CEILINGS, other], max)
    assert best == faster(dot_u7s8=210.0, read=11.0)
    with_tiles = faster(dot_u7s8=210.0, read=11.0, tile_s8=300.0)
    assert combine_ceilings([with_tiles, other], max) == with_tiles, "other has no tiles"


def test_the_median_is_taken_of_each_field() -> None:
    samples = [faster(read=read, fma=fma) for read, fma in ((9.0, 70.0), (30.0, 60.0), (8.0, 80.0))]
    assert combine_ceilings(samples, median) == faster(read=9.0, fma=70.0)


def test_each_pass_is_compared_with_the_ceilings_before_it() -> None:
    """A change of the machine's speed that affects both does not change the share."""
    work = KernelWork(num_bytes=20.0)
    measured = _Measurement({"k": ("", work)}, {}, dict)
    for speed in (1.0, 0.5, 0.25):
        measured.add(faster(read=10.0 * speed), [{"k": 2.5 / speed}, {"k": 9.0}, {"k": 2.5 / speed}])
    (time,) = measured.times()
    assert time.ceiling_share == pytest.approx(0.8)
    assert (time.limited_by, time.seconds.median) == ("memory", 5.0)


def test_work_is_added_by_unit() -> None:
    assert KernelWork({"fma": 1.0}, 2.0) + KernelWork({"fma": 3.0, "dot_u8s8": 4.0}, 5.0) == KernelWork(
        {"fma": 4.0, "dot_u8s8": 4.0}, 7.0
    )


@pytest.mark.parametrize("arch", ["llama", "opt"])
def test_linear_layers_are_those_of_the_model(tiny_model_dir: TinyModel, arch: str) -> None:
    folder = tiny_model_dir(arch)
    config = model_config(folder)
    loaded: list[tuple[tuple[str, ...], int, int]] = []
    made: list[str] = []

    class Recorder:
        def __init__(self) -> None:
            self._kernels = get_kernels("reference")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._kernels, name)

        def load_matrix(self, weights: Any, parts: Any, in_features: int) -> Any:
            names = tuple(f"{name}.weight" for name, _ in parts)
            loaded.append((names, sum(out for _, out in parts), in_features))
            return self._kernels.load_matrix(weights, parts, in_features)

        def make_linear(self, matrix: Any, bias: Any, prologue: Any) -> Any:
            made.append(prologue.kind)
            return self._kernels.make_linear(matrix, bias, prologue)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "get_kernels", lambda *_: Recorder())
        weights = RandomWeights(config, torch.float32, torch.device("cpu"))
        build_model(config, weights, dtype=torch.float32, device="cpu", kernels="reference")
    products = [*(product for layer in config.layers for product in layer.products), config.head_product]
    matrices = [product.matrix for product in products]
    assert {(each.weight_names, each.out_features, each.in_features) for each in matrices} <= set(loaded)
    assert [product.prologue for product in products] == made


# -- passes --------------------------------------------------------------------------------------------------------


@needs_native
def test_a_pass_counts_every_weight_once(tiny_model_dir: TinyModel) -> None:
    config = model_config(tiny_model_dir("llama"))

    def parts_of(matrix: MatrixSpec) -> list[tuple[str, int]]:
        return [("q8_0" if matrix.kernel == LM_HEAD else "q4_0", matrix.out_features)]

    layers = LinearPass(load(), config, parts_of, MAX_ROWS + 1)
    seconds = layers(3)
    assert list(seconds) == layers.kernels == [LAYERS, "qkv", "output", "gate_up", "down", LM_HEAD]
    assert all(value > 0 for value in seconds.values())
    by_calls = layers(MAX_ROWS + 1)
    assert by_calls[LAYERS] == pytest.approx(sum(by_calls.values()) - by_calls[LAYERS] - by_calls[LM_HEAD])
    assert layers.formats_of(LAYERS) == "q4_0"
    assert layers.formats_of(LM_HEAD) == "q8_0"
    one_layer = [(128, 64), (64, 64), (192, 64), (64, 96)]
    assert layers.work(LAYERS, 3) == KernelWork(
        {"dot_u7s8": 2 * sum(2 * 3 * out * size for out, size in one_layer)},
        2 * sum(matrix_bytes("q4_0", out, size) for out, size in one_layer),
    )
    assert layers.work(LM_HEAD, 3) == KernelWork({"dot_u8s8": 2 * 3 * 256 * 64}, matrix_bytes("q8_0", 256, 64))


@needs_native
def test_attention_reads_each_key_once(tiny_model_dir: TinyModel) -> None:
    def work(arch: str, **case: int) -> KernelWork:
        config = model_config(tiny_model_dir(arch))
        layers = AttentionPass(config, kv_dtype=torch.bfloat16, block_size=16, **case)
        assert layers()[layers.kernel] > 0
        assert layers.num_layers == 2
        in_tiles = layers.work("amx")
        work = layers.work("avx2")
        assert in_tiles == KernelWork({"tile_bf16": work.operations["fma"]}, work.num_bytes)
        return work

    token_bytes, per_key = 2 * 2 * 16 * 2, 4 * 4 * 16
    assert work("llama", num_seqs=3, num_queries=1, context=50) == KernelWork(
        {"fma": 3 * 50 * per_key}, 3 * 50 * token_bytes
    )
    seen = sum(range(41, 51))
    assert work("llama", num_seqs=1, num_queries=10, context=50) == KernelWork(
        {"fma": seen * per_key}, 50 * token_bytes
    )
    # A window of 24 keys: the first of ten queries sees 24, and so do the others; 33 keys are read.
    windowed = work("mistral", num_seqs=1, num_queries=10, context=50)
    assert windowed == KernelWork({"fma": 10 * 24 * per_key}, 33 * token_bytes)


@needs_native
def test_a_recurrence_reads_each_state_once(tiny_model_dir: TinyModel) -> None:
    config = model_config(tiny_model_dir("granite4_h"))
    layers = RecurrencePass(config, num_seqs=3, num_queries=1)
    assert layers()["decode"] > 0
    specs = [layer.recurrence for layer in config.layers if layer.recurrence is not None]
    assert layers.num_layers == len(specs)
    assert layers.work().num_bytes * len(specs) == 3 * 4 * config.state_values_per_sequence
    longer = RecurrencePass(config, num_seqs=3, num_queries=5)
    assert longer()["prefill"] > 0
    assert longer.work() == KernelWork({"fma": 5 * layers.work().operations["fma"]}, layers.work().num_bytes)


@needs_native
def test_recurrences_have_a_table(tiny_model_dir: TinyModel) -> None:
    result, table, record = run(tiny_model_dir("granite4_h"))
    assert [time.case["num_queries"] for time in result.recurrence] == [1, 1, 64]
    assert "recurrence, one layer" in table
    assert len(record["recurrence"]) == 3


def test_the_slots_are_those_of_the_last_tokens() -> None:
    metadata = _metadata(num_seqs=3, num_queries=4, context=21, block_size=8)
    assert sorted(metadata.block_tables.flatten().tolist()) == list(range(9))
    tables = metadata.block_tables.tolist()
    expected = [table[position // 8] * 8 + position % 8 for table in tables for position in range(17, 21)]
    assert metadata.slot_mapping.tolist() == expected
    assert metadata.query_start_loc_host == [0, 4, 8, 12]


@needs_native
def test_ceilings_are_measured() -> None:
    meter = CeilingMeter(load(), 0.01, read_bytes=1 << 20)
    ceilings, sample = meter.measure(), meter.sample()
    assert (sample.isa, sample.num_threads) == (ceilings.isa, ceilings.num_threads)
    assert min(sample.speeds.values()) > 1e8
    assert {"dot_u8s8", "dot_u7s8", "fma", "read"} <= sample.speeds.keys()
    assert ceilings.isa == load().isa()
    assert min(ceilings.speeds.values()) > 1e9


# -- the whole -----------------------------------------------------------------------------------------------------


def run(folder: Path, options: KernelOptions = OPTIONS, **changes: Any) -> tuple[KernelResult, str, dict[str, Any]]:
    result = run_kernels(EngineConfig(model=str(folder), num_threads=1, **changes), options)
    out = io.StringIO()
    print_kernels(result, out)
    print_kernels(result, out, as_json=True)
    *table, last = out.getvalue().splitlines()
    return result, "\n".join(table), json.loads(last)


@needs_native
def test_the_formats_of_the_file_are_measured(tiny_model_dir: TinyModel) -> None:
    result, table, record = run(tiny_model_dir("llama"))
    assert {time.format for time in result.linear} == {"f32"}
    assert len(result.linear) == 2 * 6
    assert [time.case for time in result.attention if time.kernel == "prefill"] == [
        {"batch_size": 1, "num_queries": 20, "context": 20},
        {"batch_size": 1, "num_queries": 64, "context": 64},
    ]
    assert len(result.attention) == 2 * 3
    assert [time.kernel for time in result.sampling] == ["greedy", "greedy", "random", "random"]
    assert all(time.ceiling_share is None for time in result.sampling)
    first = record["linear"][0]
    assert first["operations_per_s"] == pytest.approx(2 * 2 * 30720 / first["seconds"]["median"])
    assert first["ceiling_share"] > 0  # more than 1 where all weights fit the caches
    assert first["seconds"]["min"] <= first["seconds"]["median"] <= first["seconds"]["max"]
    assert record["ceilings"]["num_threads"] == record["machine"]["num_threads"] == 1
    for label in ("ceilings", "gate_up", "new tokens", "greedy", "reading memory, GB/s"):
        assert label in table


@needs_native
def test_several_formats_are_measured(tiny_model_dir: TinyModel) -> None:
    options = KernelOptions(
        rows=(1, 4), formats=("q4_1", "int8", "bf16"), batch_sizes=(), contexts=(), repeats=1, ceiling_seconds=0.01
    )
    result, table, record = run(tiny_model_dir("opt"), options)
    assert {(time.kernel, time.format) for time in result.linear} == {
        (kernel, name) for kernel in (LAYERS, "qkv", "output", "up", "down", LM_HEAD) for name in options.formats or ()
    }
    assert not result.attention
    assert not result.sampling
    assert record["options"]["formats"] == ["q4_1", "int8", "bf16"]
    assert "int8" in table
    assert "% of ceiling" in table


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rows": ()}, "rows and formats must have at least one value each"),
        ({"rows": (0,)}, "rows must be at least 1, got 0"),
        ({"batch_sizes": (4, -1)}, "batch_sizes must be at least 1, got -1"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"formats": ("q1_0",)}, "formats must be one of q2_k, .* got 'q1_0'"),
    ],
)
def test_errors_name_the_option(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        KernelOptions(**changes)


@needs_native
def test_a_context_longer_than_that_of_the_model_is_rejected(tiny_model_dir: TinyModel) -> None:
    with pytest.raises(ConfigError, match="contexts must be at most 256 for this model, got 257"):
        run_kernels(EngineConfig(model=str(tiny_model_dir("llama"))), KernelOptions(contexts=(1, 257)))


@needs_native
def test_the_command_prints_one_json_line(tiny_model_dir: TinyModel) -> None:
    sizes = ["--rows", "1,2", "--batch-sizes", "1", "--contexts", "16", "--repeats", "1", "--num-threads", "1"]
    result = invoke(["bench", "kernels", "--model", str(tiny_model_dir("llama")), *sizes, "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["options"]["rows"] == [1, 2]
    rejected = invoke(["bench", "kernels", "--rows", "1,x"])
    assert rejected.exit_code != 0
