"""The benchmark of native kernels on tiny random models: its arithmetic, and the kernels that it measures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks.attention_steps import AttentionCase, attention_metadata
from benchmarks.burst_ceiling import burst_work
from benchmarks.kernels import LAYERS, AttentionPass, KernelWork, LinearPass, Measurement

from benchmarks import kernels
from chairlift.errors import ConfigError
from chairlift.kernels.cpu.formats import matrix_bytes
from chairlift.kernels.cpu.tape import MAX_ROWS
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.loading.resolve import resolve_model
from chairlift.models.declaration.matrix_spec import LM_HEAD, MatrixSpec
from chairlift.models.declaration.model_config import ModelConfig
from support.native import needs_native

TinyModel = Callable[..., Path]
SPEEDS = {"dot_s8s8": 100.0, "dot_u4s8": 200.0, "fma": 50.0, "read": 10.0}


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "MIN_SECONDS", 0.0)


def model_config(folder: Path) -> ModelConfig:
    return resolve_model(str(folder)).config()


def test_the_slower_of_compute_and_memory_is_the_ceiling() -> None:
    assert KernelWork({"dot_s8s8": 50.0, "dot_u4s8": 100.0}, 5.0).least_seconds(SPEEDS) == (1.0, "compute")
    assert KernelWork({"fma": 50.0}, 20.0).least_seconds(SPEEDS) == (2.0, "memory")


def test_each_pass_is_compared_with_the_ceilings_before_it() -> None:
    """A change of the machine's speed that affects both does not change the share."""
    measured = Measurement({"rows": 1}, dict, {"k": KernelWork(num_bytes=20.0)})
    for speed in (1.0, 0.5, 0.25):
        measured.samples.append((SPEEDS | {"read": 10.0 * speed}, {"k": 2.5 / speed}))
    (record,) = measured.records()
    assert record["ceiling_share"] == pytest.approx(0.8)
    assert (record["limited_by"], record["bytes_per_s"]) == ("memory", 4.0)


@needs_native
def test_a_pass_counts_every_weight_once(tiny_model_dir: TinyModel) -> None:
    def parts_of(matrix: MatrixSpec) -> list[tuple[str, int]]:
        return [("q8_0" if matrix.kernel == LM_HEAD else "q4_0", matrix.out_features)]

    layers = LinearPass(model_config(tiny_model_dir("llama")), parts_of, MAX_ROWS + 1)
    seconds, work = layers(3), layers.work(3)
    assert set(seconds) == set(work) == {LAYERS, "qkv", "output", "gate_up", "down", LM_HEAD}
    assert all(value > 0 for value in seconds.values())
    by_calls = layers(MAX_ROWS + 1)
    assert by_calls[LAYERS] == pytest.approx(sum(by_calls.values()) - by_calls[LAYERS] - by_calls[LM_HEAD])
    assert (layers.formats[LAYERS], layers.formats[LM_HEAD]) == ("q4_0", "q8_0")
    one_layer = [(128, 64), (64, 64), (192, 64), (64, 96)]
    assert work[LAYERS] == KernelWork(
        {"dot_u4s8": 2 * sum(2 * 3 * out * size for out, size in one_layer)},
        2 * sum(matrix_bytes("q4_0", out, size) for out, size in one_layer),
    )
    assert work[LM_HEAD] == KernelWork({"dot_s8s8": 2 * 3 * 256 * 64}, matrix_bytes("q8_0", 256, 64))


@needs_native
def test_attention_reads_each_key_once(tiny_model_dir: TinyModel) -> None:
    def work(arch: str, case: AttentionCase) -> KernelWork:
        layers = AttentionPass(model_config(tiny_model_dir(arch)), torch.bfloat16, 16, case)
        assert layers()[layers.kernel] > 0
        found = layers.work("avx2")
        assert layers.work("amx") == KernelWork({"tile_bf16": found.operations["fma"]}, found.num_bytes)
        return found

    token_bytes, per_key = 2 * 2 * 16 * 2, 4 * 4 * 16
    assert work("llama", AttentionCase(3, 1, 50)) == KernelWork({"fma": 3 * 50 * per_key}, 3 * 50 * token_bytes)
    seen = sum(range(41, 51))
    assert work("llama", AttentionCase(1, 10, 50)) == KernelWork({"fma": seen * per_key}, 50 * token_bytes)
    # A window of 24 keys: the first of ten queries sees 24, and so do the others; 33 keys are read.
    windowed = work("mistral", AttentionCase(1, 10, 50))
    assert windowed == KernelWork({"fma": 10 * 24 * per_key}, 33 * token_bytes)


def test_the_slots_are_those_of_the_last_tokens() -> None:
    metadata = attention_metadata(AttentionCase(num_seqs=3, num_queries=4, context=21), block_size=8)
    assert sorted(metadata.block_tables.flatten().tolist()) == list(range(9))
    tables = metadata.block_tables.tolist()
    expected = [table[position // 8] * 8 + position % 8 for table in tables for position in range(17, 21)]
    assert metadata.slot_mapping.tolist() == expected
    assert metadata.query_start_loc_host == [0, 4, 8, 12]
    tables = attention_metadata(AttentionCase(3, 1, 21, num_shared=16), block_size=8).block_tables
    assert (tables[:, :2] == tables[0, :2]).all()
    assert len(set(tables[:, 2].tolist())) == 3


@needs_native
def test_tables_and_json(tiny_model_dir: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "1,9", "--batch-sizes", "1,3", "--contexts", "20,64", "--shared-keys", "128", "--rounds", "1"]
    arguments = ["--model", str(tiny_model_dir("llama")), "--formats", "q4_1,int8", "--num-threads", "1", *sizes]
    kernels.main([*arguments, "--json"])
    record = json.loads(capsys.readouterr().out)["results"]
    names = {LAYERS, "qkv", "output", "gate_up", "down", LM_HEAD}
    assert {(time["kernel"], time["format"]) for time in record["linear"]} == {
        (name, weights) for name in names for weights in ("q4_1", "int8")
    }
    assert all(time["ceiling_share"] > 0 for time in (*record["linear"], *record["attention"]))
    assert [time["num_queries"] for time in record["attention"]] == [1, 1, 20, 1, 1, 64, 1, 1]
    shared = [(time["kernel"], time["num_seqs"]) for time in record["attention"] if time["num_shared"] == 128]
    assert shared == [("decode for each", 3), ("decode", 3)]
    kernels.main(arguments)
    output = capsys.readouterr().out
    assert "reading memory, GB/s" in output
    assert "attention of one layer" in output


@needs_native
@pytest.mark.parametrize(
    ("arch", "option", "problem"),
    [
        ("mixtral", ["--rows", "1"], "mixtral is a mixture of experts"),
        ("llama", ["--contexts", "1,257"], "contexts must be at most 256 for this model, got 257"),
    ],
)
def test_models_that_cannot_be_measured(tiny_model_dir: TinyModel, arch: str, option: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        kernels.main(["--model", str(tiny_model_dir(arch)), *option])


@needs_native
def test_a_burst_needs_the_products_of_every_token_that_is_computed(tiny_model_dir: TinyModel) -> None:
    source = resolve_model(str(tiny_model_dir("llama")))
    model = source.config()
    workload = [WorkloadRequest("r0", 0.0, [1, 2, 3], 2), WorkloadRequest("r1", 0.0, [1], 1)]
    layer = 128 * 64 + 64 * 64 + 192 * 64 + 64 * 96
    linear = 2 * 2 * layer * (4 + 1) + 2 * 256 * 64 * (2 + 1)
    attention = 2 * 4 * 64 * (1 + 2 + 3 + 4 + 1)
    assert burst_work(model, source.formats(model), "q8_0", workload).num_operations == linear + attention
