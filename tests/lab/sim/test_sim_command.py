"""The command `chairlift simulate`."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from chairlift.config import EngineConfig
from chairlift.engine.progress import AdvanceBar
from chairlift.engine.startup.memory_plan import plan_memory
from chairlift.errors import ChairliftError
from chairlift.events import read_events
from chairlift.lab.bench import calibrate
from chairlift.lab.metrics.run import summarize
from chairlift.lab.sim.devices import find_device
from chairlift.lab.sim.model_shape import MODEL_SHAPES
from chairlift.loading.model_source import declared_formats
from support.command_runner import invoke
from support.pooling_models import write_pooling_model

SMALL = ["--num-prompts", "6", "--input-len", "uniform:3..40", "--output-len", "uniform:2..20"]


def run(*arguments: str) -> str:
    """Runs the command and returns its output; raises its error."""
    result = invoke(["simulate", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def record_of(*arguments: str) -> dict[str, Any]:
    """Runs the command with --json and returns its only line."""
    (line,) = run(*arguments, "--json").splitlines()
    record = json.loads(line)
    assert isinstance(record, dict)
    return record


def test_output_has_constants_and_a_table_or_json(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    arguments = [*SMALL, "--num-kv-blocks", "300", "--request-rate", "5"]
    text = run(*arguments, "--event-log", str(log))
    places = [text.index(part) for part in ("flops_efficiency", "KV pool 300 blocks", "output tokens")]
    assert places == sorted(places)
    assert "{" not in text
    record = record_of(*arguments)
    assert record["engine"]["num_blocks"] == 300
    assert record["results"] == asdict(summarize(read_events(log)))
    assert record["results"]["num_answered"] == 6
    assert record["num_steps"] == record["results"]["num_steps"]
    assert record_of(*arguments, "--workload-seed", "1")["results"] != record["results"]


def test_engine_options() -> None:
    switches = ["--batching", "static", "--static-batch-size", "2", "--kv", "max", "--max-model-len", "128"]
    record = record_of(*SMALL, *switches, "--num-kv-blocks", "64", "--kv-arena", "first-fit")
    engine = record["engine"]
    assert (engine["batching"], engine["static_batch_size"], engine["kv"], engine["kv_arena"]) == (
        "static", 2, "max", "first-fit",
    )  # fmt: skip
    assert record["results"]["padding_tokens"] > 0
    assert record["results"]["itl"] is None


def test_pool_size_is_that_of_the_planner() -> None:
    engine = record_of(*SMALL, "--device", "A100-40GB")["engine"]
    config = EngineConfig(device="cuda", dtype="float16", max_num_seqs=engine["max_num_seqs"])
    model_config = MODEL_SHAPES["opt-13b"].config
    formats = declared_formats(model_config)
    memory = plan_memory(config, model_config, formats, find_device("A100-40GB").memory_bytes, 0.9)
    assert engine["num_blocks"] == memory.pool.num_blocks
    given = record_of(*SMALL, "--kv-cache-memory-bytes", "12GiB")["engine"]
    assert given["num_blocks"] == (12 << 30) // (819_200 * 16) - 1 == 982, "one of them is spare"


def test_model_and_trace_from_files(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival": 0.5 * i, "prompt_len": 10 + i, "output_len": 5} for i in range(4)]
    rows.append({"arrival": 9.0, "prompt_len": 400, "output_len": 5})
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--model", str(folder), "--trace", str(trace), "--num-kv-blocks", "64"]
    text, record = run(*arguments), record_of(*arguments)
    assert (record["engine"]["model"], record["engine"]["max_model_len"]) == ("mine", 128)
    assert record["engine"]["kv_bytes_per_slot"] == 2 * 2 * 2 * 16 * 2
    assert record["results"]["output_tokens"] == 20
    assert len(record["rejected"]) == 1
    assert "1 rejected request can never fit" in text


def test_fitted_cost_model_reproduces_the_recorded_time(tmp_path: Path) -> None:
    """The recorded run is a simulated one here."""
    log = tmp_path / "events.jsonl"
    original = record_of(*SMALL, "--request-rate", "2", "--num-kv-blocks", "300", "--event-log", str(log))
    arguments = [*SMALL, "--request-rate", "2", "--num-kv-blocks", "300", "--fitted-to", str(log)]
    fitted, record = run(*arguments), record_of(*arguments)
    assert "residual" in fitted
    assert record["simulated_seconds"] == pytest.approx(original["simulated_seconds"], rel=0.02)


def test_fitted_cost_model_uses_the_recorded_engine(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    run(*SMALL, "--request-rate", "1", "--num-kv-blocks", "70", "--block-size", "8", "--event-log", str(log))
    arguments = [*SMALL, "--fitted-to", str(log), "--kv", "max", "--max-model-len", "64"]
    text, record = run(*arguments), record_of(*arguments)
    engine = record["engine"]
    assert [engine[name] for name in ("model", "num_blocks", "block_size", "max_model_len", "kv")] == [
        "opt-13b", 70, 8, 64, "max",
    ]  # fmt: skip
    assert "KV pool 70 blocks of 8" in " ".join(text.replace("│", " ").split())
    smaller = record_of(*SMALL, "--fitted-to", str(log), "--num-kv-blocks", "40")["engine"]
    assert (smaller["num_blocks"], smaller["block_size"], smaller["max_model_len"]) == (40, 16, 560)


def test_presets_are_listed_and_run() -> None:
    assert "vllm-fig3" in run("--list")
    assert record_of("--preset", "vllm-fig3")["preset"] == "vllm-fig3"


def test_the_title_comes_before_the_simulation() -> None:
    """An option that does not apply is found after the title."""
    failed = invoke(["simulate", "--preset", "vllm-fig3", "--num-prompts", "3"])
    assert "Slots reserved and never used" in failed.stdout
    failed = invoke(["simulate", *SMALL, "--max-model-len", "4096"])
    assert failed.stderr.startswith("Simulating requests that arrive at once: prompt uniform:3..40")


@pytest.mark.parametrize(
    ("module", "arguments"), [("lab.presets", ["--preset", "vllm-fig3"]), ("lab.bench.simulation", SMALL)]
)
def test_the_progress_bar_advances_to_its_end(
    module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    totals, advanced = list[int](), list[int]()

    @contextmanager
    def recorded_bar(_description: str, total: int) -> Iterator[AdvanceBar]:
        totals.append(total)
        yield lambda steps=1, /: advanced.append(steps)

    monkeypatch.setattr(f"chairlift.{module}.progress_bar", recorded_bar)
    run(*arguments)
    assert [sum(advanced)] == totals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--list", "--kv", "max"], "--kv cannot be combined with --list"),
        (["--preset", "vllm-fig3", "--model", "opt-13b"], "--model cannot be combined with --preset"),
        (["--preset", "vllm-fig3", "--num-prompts", "3"], "num_prompts=3 does not apply"),
        (["--preset", "vllm-fig3", "--list"], "--preset cannot be combined with --list"),
        (["--calibrate", "x", "--device", "H200"], "--device cannot be combined with --calibrate"),
        (["--num-threads", "3"], "--num-threads needs --calibrate"),
        (["--model", "opt-175b"], "leaves nothing for K and V"),
        (["--model", "unknown/not a model"], "or a shape: opt-13b"),
        (["--device", "abacus"], "no such device or file"),
        (["--max-model-len", "4096"], "max_model_len=4096 exceeds the model's context of 2048"),
        (["--kv-cache-memory-bytes", "1KB"], "holds 0 blocks"),
        (["--fitted-to", "nowhere.jsonl"], "event log nowhere.jsonl cannot be read: No such file"),
        (["--fitted-to", "x", "--tensor-parallel-size", "2"], "leave one of them out"),
        (["--event-log", "nowhere/at/all"], "event_log=nowhere/at/all: No such file"),
        (["--device", __file__], "test_sim_command.py is not a file of chairlift simulate --calibrate: "),
    ],
)
def test_invalid_options_are_rejected(arguments: list[str], message: str) -> None:
    with pytest.raises(ChairliftError, match=re.escape(message)):
        run(*arguments)


def test_a_device_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cpu.json"
    path.touch()
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(ChairliftError, match=r"device=.*cpu\.json: cannot be read: Permission denied; allow reading"):
        run("--device", str(path))


def test_an_encoder_is_not_simulated(tmp_path: Path) -> None:
    folder = write_pooling_model(tmp_path, "bert")
    with pytest.raises(ChairliftError, match="is an encoder, which has no KV memory: use a decoder"):
        run("--model", str(folder))


def test_the_file_of_a_calibration_is_checked_before_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.lab.bench.calibrate.calibrate", lambda _: pytest.fail("measured"))
    with pytest.raises(ChairliftError, match=r"calibrate=nowhere/cpu.json: No such file.*create the folder nowhere"):
        run("--calibrate", "nowhere/cpu.json")


def test_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrates with tiny matrices, reads the device file and simulates with it."""
    path = tmp_path / "cpu.json"
    sizes = {"ROWS": 8, "SHAPES": ((64, 64),), "WEIGHT_BYTES": 1 << 20, "DEPTHS": (1, 3), "NUM_STEPS": 12, "REPEATS": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(calibrate, name, size)
    printed = run("--calibrate", str(path), "--num-threads", "1")
    device = find_device(str(path))
    assert (device.flops_efficiency, device.bandwidth_efficiency, device.bytes_per_value) == (1.0, 1.0, 4)
    assert 0 < device.step_overhead + device.layer_overhead < 1
    assert "1 row by 1 MiB" in printed
    assert "step overhead" in printed
    record = record_of(*SMALL, "--device", str(path), "--model", "smollm2-135m", "--num-kv-blocks", "64")
    assert record["engine"]["weight_bytes"] == 4 * 134_479_872


COMPARED = ("--policies", "fcfs,srpt:oracle", "--kv", "paged,exact", "--max-num-seqs", "2", "--num-kv-blocks", "64")
NAMES = [f"{order} over {kv}" for order in ("fcfs", "srpt:oracle") for kv in ("paged", "exact")]


def test_several_policies_serve_the_same_requests_and_are_columns_of_one_table() -> None:
    text, record = run(*SMALL, *COMPARED), record_of(*SMALL, *COMPARED)
    header = next(line for line in text.splitlines() if line.startswith("┃") and "over" in line)
    assert [cell.strip() for cell in header.strip("┃").split("┃")] == ["", *NAMES]
    found = record["policies"]
    assert list(found) == NAMES
    engines = [each["engine"] for each in found.values()]
    assert [(each["scheduling_policy"], each["kv"]) for each in engines] == [
        ("fcfs", "paged"), ("fcfs", "exact"), ("srpt", "paged"), ("srpt", "exact"),
    ]  # fmt: skip
    assert len({each["max_model_len"] for each in engines}) == 1
    assert {each["results"]["output_tokens"] for each in found.values()} == {
        found[NAMES[0]]["results"]["output_tokens"]
    }
    alone = record_of(*SMALL, *COMPARED[4:], "--scheduling-policy", "srpt", "--length-predictor", "oracle")
    assert found["srpt:oracle over paged"]["results"] == alone["results"]


def test_values_are_written_as_csv_and_as_a_picture(tmp_path: Path) -> None:
    table, picture = tmp_path / "values.csv", tmp_path / "values.pdf"
    record = record_of(*SMALL, *COMPARED, "--output", str(table))
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert [row["policy"] for row in rows] == NAMES
    found = [each["results"]["output_tokens_per_s"] for each in record["policies"].values()]
    assert [float(row["output_tokens_per_s"]) for row in rows] == found
    run(*SMALL, *COMPARED, "--output", str(picture))
    assert picture.read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "fcfs,srpt:oracle", "--batching", "static"], "policies cannot be combined with batching"),
        (["--kv", "paged,exact", "--event-log", "log.jsonl"], "event_log=log.jsonl has one run, got 2 policies"),
        (["--policies", "static/max,paged", "--kv", "exact"], "kv=exact replaces the KV policy in static/max, paged: "),
        (
            ["--policies", "fcfs,srpt:oracle", "--scheduling-policy", "mlfq"],
            "scheduling_policy=mlfq has no effect on fcfs, srpt",
        ),
        (
            ["--policies", "srpt:oracle", "--length-predictor", "history"],
            "length_predictor=history has no effect on srpt:",
        ),
        (["--policies", "paged,exact", "--static-batch-size", "4"], "static_batch_size=4: none of the policies is st"),
        (["--kv-arena", "first-fit"], "kv_arena=first-fit: none of the policies reserves; leave it out"),
        (["--output", "values.xls"], "output=values.xls must end with .csv, .png, .pdf, .svg"),
        (["--kv", "paged,best"], "kv must be one of paged, exact, max, pow2, oracle, or module:Class, got 'best'"),
    ],
)
def test_options_that_exclude_each_other(arguments: list[str], message: str) -> None:
    with pytest.raises(ChairliftError) as failed:
        run(*SMALL, *arguments)
    assert message in str(failed.value)


def test_options_of_the_engine_apply_to_the_policies_whose_names_leave_them_open() -> None:
    given = ["--policies", "static/max,srpt:oracle", "--static-batch-size", "2", "--scheduling-policy", "priority"]
    engines = {name: each["engine"] for name, each in record_of(*SMALL, *given)["policies"].items()}
    found = [(each["static_batch_size"], each["scheduling_policy"]) for each in engines.values()]
    assert found == [(2, "priority"), (None, "srpt")]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((), "continuous/paged/fcfs"),
        (("--policies", "srpt:oracle"), "continuous/paged/srpt:oracle"),
        (("--batching", "static", "--static-run-to", "global", "--kv", "max"), "static-global/max/fcfs"),
    ],
)
def test_a_single_policy_has_its_name_in_the_file(arguments: tuple[str, ...], name: str, tmp_path: Path) -> None:
    table = tmp_path / "values.csv"
    run(*SMALL, *arguments, "--output", str(table))
    (row,) = csv.DictReader(table.open(encoding="utf-8"))
    assert row["policy"] == name


def test_a_picture_needs_matplotlib_before_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.lab.bench.policy_values.find_spec", lambda _: None)
    failed = invoke(["simulate", *SMALL, "--output", str(tmp_path / "values.png")])
    assert "values.png needs matplotlib, which is not installed" in str(failed.exception)
    assert "Simulating requests" not in failed.output
    assert run(*SMALL, "--output", str(tmp_path / "values.csv"))


def test_the_results_are_printed_before_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.cli.simulate.write_values", Mock(side_effect=ChairliftError("disk full")))
    failed = invoke(["simulate", *SMALL, "--output", str(tmp_path / "values.csv")])
    assert str(failed.exception) == "disk full"
    assert "output tokens" in failed.stdout
