"""`bench latency` on a tiny random model, its arithmetic on given events, and the command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.events import Event, RequestArrived, Step
from chairlift.lab.bench.latency import LatencyOptions, largest_useful_size, measure_iteration, run_latency
from support.command_runner import invoke

TinyModel = Callable[..., Path]
OPTIONS = LatencyOptions(input_len=12, output_len=5, batch_size=(3,), num_iters=3, num_iters_warmup=1)


def config(tiny_model_dir: TinyModel, **changes: Any) -> EngineConfig:
    return EngineConfig(model=str(tiny_model_dir("llama")), num_threads=1, **{"num_kv_blocks": 64, **changes})


def step(time: float, num_new: dict[str, int]) -> Step:
    ids, new = list(num_new), list(num_new.values())
    ones = [1] * len(ids)
    return Step(time, 0, time - 0.5, ids, ones, ones, new, [], [], [], len(ids), 0, 9, 0)


def arrivals(*request_ids: str) -> list[Event]:
    return [RequestArrived(1.0, request_id, 4, 3) for request_id in request_ids]


def test_prefill_ends_with_the_last_first_token() -> None:
    steps = [step(3.0, {"a": 1, "b": 0}), step(4.0, {"a": 1, "b": 1}), step(4.5, {"a": 1, "b": 1}), step(6.0, {"b": 1})]
    assert measure_iteration([*arrivals("a", "b"), *steps]) == {"latency": 5.0, "prefill": 3.0, "decode_per_token": 1.0}


def test_one_token_has_no_decode() -> None:
    assert measure_iteration([*arrivals("a"), step(3.0, {"a": 1})]) == {
        "latency": 2.0,
        "prefill": 2.0,
        "decode_per_token": None,
    }


def test_every_iteration_is_one_batch(tiny_model_dir: TinyModel) -> None:
    result = run_latency(config(tiny_model_dir), OPTIONS)
    (runs,) = result.runs.values()
    assert len(runs) == 3
    for run in runs:
        latency, prefill, decode = run["latency"], run["prefill"], run["decode_per_token"]
        assert latency is not None
        assert prefill is not None
        assert decode is not None
        assert 0 < prefill < latency
        assert latency == pytest.approx(prefill + 4 * decode)
    latencies = [run["latency"] or 0.0 for run in runs]
    spread = result.spread(result.baseline, "latency")
    assert spread is not None
    assert (spread.min, spread.max) == (min(latencies), max(latencies))
    assert spread.median == sorted(latencies)[1]


def test_several_sizes_are_measured_alternately(tiny_model_dir: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_latency(config(tiny_model_dir), replace(OPTIONS, batch_size=(4, 1, 2)))
    assert list(result.runs) == ["1", "2", "4"]
    for size, runs in result.runs.items():
        assert len(runs) == 3
        assert [run["decode_tokens_per_s"] for run in runs] == [
            int(size) / (run["decode_per_token"] or 0) for run in runs
        ]
    result.print()
    table = capsys.readouterr().out
    assert "ratio to 1" in table
    assert "batch size 1, 2, 4;" in table


@pytest.mark.parametrize(
    ("speeds", "line"),
    [
        ({1: [10.0], 2: [3.0, 19.0, 4.0], 4: [20.0], 8: [19.0]}, "batch size 2 is the smallest with at least 90%"),
        ({1: [10.0], 2: [20.0]}, "batch size 2 .*; larger ones were not measured"),
    ],
)
def test_the_smallest_size_near_the_highest_speed_is_named(speeds: dict[int, list[float]], line: str) -> None:
    runs = {size: [{"decode_tokens_per_s": value} for value in values] for size, values in speeds.items()}
    (found,) = largest_useful_size(runs)
    assert re.match(line, found)


def test_no_size_is_named_without_a_comparison() -> None:
    assert largest_useful_size({4: [{"decode_tokens_per_s": 9.0}]}) == []
    assert largest_useful_size({size: [{"decode_tokens_per_s": None}] for size in (1, 2)}) == []


def test_the_report_has_a_table_and_one_json_line(
    tiny_model_dir: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_latency(config(tiny_model_dir, num_kv_blocks=20), OPTIONS)
    result.print()
    result.print(True)
    *table, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    assert record["benchmark"] == "latency"
    assert record["machine"] == asdict(result.machine)
    (system,) = record["systems"].values()
    assert system["engine"]["num_blocks"] == 20
    assert record["workload"]["batch_size"] == [3]
    assert set(system["results"]["prefill"]) == {"median", "min", "max"}
    assert len(system["runs"]) == 3
    for label in ("batch size 3", "latency", "prefill", "decode", "torch"):
        assert any(label in line for line in table), label


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        (
            {"max_num_seqs": 2},
            "batch_size=3 .* do not fit max_num_seqs seats at once: 2 run, and the next one needs 1 block of",
        ),
        ({"num_kv_blocks": 3, "block_size": 8}, "batch_size=3 .* do not fit the KV pool at once: 1 run"),
        ({"num_kv_blocks": 7, "block_size": 4, "enable_prefix_caching": False}, "batch_size=3 .*the KV pool"),
    ],
)
def test_requests_that_do_not_form_one_batch_are_rejected(
    tiny_model_dir: TinyModel, engine: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_latency(config(tiny_model_dir, **engine), OPTIONS)


def test_a_length_that_does_not_fit_is_rejected(tiny_model_dir: TinyModel) -> None:
    with pytest.raises(ConfigError, match=r"\(250 prompt, 10 output tokens\) does not fit"):
        run_latency(config(tiny_model_dir), LatencyOptions(input_len=250, output_len=10))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"input_len": 0}, "input_len must be at least 1, got 0"),
        ({"batch_size": (1, 0)}, "batch_size must be at least 1, got 0"),
        ({"batch_size": ()}, "batch_size must have at least one value"),
        ({"num_iters": 0}, "num_iters must be at least 1, got 0"),
        ({"num_iters_warmup": -1}, "num_iters_warmup must be at least 0, got -1"),
    ],
)
def test_errors_name_the_option(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        LatencyOptions(**changes)


def test_the_command_prints_one_json_line(tiny_model_dir: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    batch = ["--input-len", "6", "--output-len", "3", "--batch-size", "2"]
    iterations = ["--num-iters", "2", "--num-iters-warmup", "0"]
    engine = ["--model", str(tiny_model_dir("llama")), "--num-kv-blocks", "40", "--num-threads", "1"]
    result = invoke(["bench", "latency", *engine, *batch, *iterations, "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["workload"].items() >= {"input_len": 6, "output_len": 3, "batch_size": [2], "num_iters": 2}.items()
