"""The command `chairlift plan`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from chairlift.engine.startup.required_memory import SERVER_PROCESSES_BYTES
from chairlift.errors import ChairliftError, ConfigError
from chairlift.lab.sim.devices import DEVICES
from support.command_runner import CommandResult, invoke, run_arguments
from support.native import needs_native
from support.pooling_models import write_pooling_model


def run(*arguments: str) -> CommandResult:
    return invoke(["plan", *arguments])


def record_of(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.exception
    (line,) = result.stdout.splitlines()
    record: dict[str, Any] = json.loads(line)
    return record


def served_with(command: str) -> dict[str, Any]:
    """What `chairlift serve` starts a server with for a command line."""
    program, name, *arguments = shlex.split(command)
    assert (program, name) == ("chairlift", "serve")
    with mock.patch("chairlift.server.serve.run") as run_server:
        assert invoke([name, *arguments]).exception is None
    return run_arguments(*run_server.call_args.args)


SHAREGPT = ["--input-len", "hist:sharegpt-input", "--output-len", "hist:sharegpt-output"]


def test_a_shape_on_a_device_gives_tables_and_a_command_or_one_json_line() -> None:
    arguments = ["opt-13b", "--device", "A100-40GB", "--kv-cache-memory-bytes", "12GiB", *SHAREGPT]
    result = run(*arguments)
    assert result.exit_code == 0, result.exception
    assert "982 blocks of 16 = 15,712 slots" in result.stdout
    assert "TTFT of one request alone, ms" in result.stdout
    assert "{" not in result.stdout
    record = record_of(*arguments)
    fits = {(each["pool"]["kv"], each["pool"]["kv_arena"]): each for each in record["policies"]}
    assert len(fits) == 9
    assert fits["max", "buddy"]["num_fit"] == 7
    assert fits["oracle", "buddy"]["num_fit"] < fits["paged", "buddy"]["num_fit"] == record["fit"]["num_fit"]
    assert record["serve"] in result.stdout
    assert "--device cuda --dtype float16 --kernels triton" in record["serve"]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--kv", "exact", "--kv-arena", "first-fit", "--max-tokens", "40", "--block-size", "8"],
        ["--kv", "max", "--batching", "static", "--static-batch-size", "3", "--max-num-seqs", "5"],
        ["--dtype", "bfloat16", "--max-model-len", "100", "--max-num-batched-tokens", "70"],
    ],
)
def test_the_command_starts_what_was_planned(options: list[str], tiny_model_dir: Callable[..., Path]) -> None:
    load = ["--input-len", "uniform:1..30", "--output-len", "uniform:1..30"]
    record = record_of(str(tiny_model_dir("llama")), "--memory", "320MiB", *options, *load)
    served = served_with(record["serve"])["config"]
    assert served.model == str(tiny_model_dir("llama"))
    assert served.num_kv_blocks == record["num_kv_blocks"]
    assert served.max_model_len == record["max_model_len"]
    assert served.kv == record["fit"]["pool"]["kv"]
    given = dict(zip(options[::2], options[1::2], strict=True))
    for name in given.keys() - {"--max-tokens"}:
        assert str(getattr(served, name[2:].replace("-", "_"))) == given[name]


def test_torch_kernels_need_more_memory_than_a_quantized_file(smollm2_gguf: Path) -> None:
    record = record_of(str(smollm2_gguf), "--num-kv-blocks", "100", "--kernels", "torch")
    assert record["weight_bytes"] > 5 * smollm2_gguf.stat().st_size
    assert any("The file has 93.81 MiB" in note for note in record["notes"])
    assert record["speed"] is None


@needs_native
def test_native_kernels_keep_the_formats_of_a_quantized_file(smollm2_gguf: Path) -> None:
    record = record_of(str(smollm2_gguf), "--num-kv-blocks", "100")
    assert 0.9 < record["weight_bytes"] / smollm2_gguf.stat().st_size < 1.01
    assert record["kv_bytes_per_slot"] == 30 * 3 * 64 * 2 * 2
    options = ("--num-kv-blocks", "100", "--kv-cache-dtype", "int8", "--quantization", "q4_0")
    smaller = record_of(str(smollm2_gguf), *options)
    assert smaller["kv_bytes_per_slot"] == 30 * 3 * (64 * 2 + 8)
    assert smaller["weight_bytes"] < record["weight_bytes"]
    assert "--kv-cache-dtype int8" in smaller["serve"]
    assert "--quantization q4_0" in smaller["serve"]


def test_a_calibrated_device_predicts_the_speed(tmp_path: Path, tiny_model_dir: Callable[..., Path]) -> None:
    file = tmp_path / "cpu.json"
    file.write_text(json.dumps({**asdict(DEVICES["H200"]), "name": "a CPU", "bytes_per_value": 4}))
    record = record_of(
        str(tiny_model_dir("llama")), "--device", str(file), "--num-kv-blocks", "60", "--request-rate", "inf"
    )
    assert record["dtype"] == "float32"
    assert record["speed"]["constants"][1][1].startswith("a CPU")
    assert served_with(record["serve"])["config"].device == "cpu"


def test_the_default_memory_is_that_of_serve(tiny_model_dir: Callable[..., Path]) -> None:
    folder = str(tiny_model_dir("llama"))
    free, given = record_of(folder), record_of(folder, "--memory", "1GiB")
    assert free["memory_bytes"] != given["memory_bytes"] == 1 << 30
    planned = given["weight_bytes"] + given["activation_bytes"] + given["kv_bytes"]
    assert free["process_bytes"] == given["process_bytes"] == SERVER_PROCESSES_BYTES
    assert planned <= (1 << 30) - SERVER_PROCESSES_BYTES
    error = run(folder, "--memory", "300MiB").exception
    assert "memory=300 MiB without 304 MiB for the processes leaves nothing for K and V" in str(error)
    device = record_of(folder, "--device", "H200")
    assert (device["memory_bytes"], device["process_bytes"]) == (DEVICES["H200"].memory_bytes, 0)
    assert served_with(device["serve"])["config"].device == "cuda"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--device", "cuda"], "device=cuda has no known size of memory"),
        (["--device", "TPU"], "no such device or file"),
        (["no-such-model"], "no such file or folder"),
        (["opt-13b", "--num-kv-blocks", "9", "--kv", "virtual"], "^kv must be one of paged, exact, .*'virtual'"),
        (["opt-13b", "--num-kv-blocks", "9", "--memory", "1GiB"], "give memory, kv_cache_memory_bytes or num_kv"),
        (["opt-13b", "--num-kv-blocks", "9", "--input-len", "zipf:3"], "zipf"),
        (["opt-13b", "--num-kv-blocks", "9", "--max-tokens", "many"], "many"),
        (["opt-13b", "--memory", "20GiB"], "leaves nothing for K and V"),
    ],
)
def test_errors_name_the_option(arguments: list[str], match: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, ChairliftError)
    with pytest.raises(ChairliftError, match=match):
        raise result.exception


def test_encoders_and_plans_without_a_replica_are_rejected(tmp_path: Path) -> None:
    result = run(str(write_pooling_model(tmp_path, "bert")), "--memory", "1GiB")
    assert "is an encoder, which has no KV memory: use a decoder" in str(result.exception)
    error = run("opt-13b", "--replicas", "0").exception
    assert isinstance(error, ConfigError)
    assert str(error) == "replicas must be at least 1, got 0"


def test_replicas_share_memory_and_requests() -> None:
    rate = ["--device", "A100-80GB", "--request-rate", "4", *SHAREGPT]
    alone = record_of("opt-13b", *rate, "--memory", "40GiB")
    shared = record_of("opt-13b", *rate[:2], "--request-rate", "8", *SHAREGPT, "--memory", "80GiB", "--replicas", "2")
    assert (alone["replicas"], shared["replicas"]) == (1, 2)
    for name in ("num_kv_blocks", "fit", "speed"):
        assert alone[name] == shared[name]
    assert shared["serve"] == f"{alone['serve']} --replicas 2"
    assert f"together they run {2 * alone['fit']['num_running']} requests" in shared["notes"][0]
    assert served_with(shared["serve"])["start_cluster"].keywords["options"].replicas == 2
