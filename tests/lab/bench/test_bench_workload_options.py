"""The workloads of benchmarks, and the driver that runs them: closed loops, traces, declared lengths."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.config import EngineConfig
from chairlift.engine.startup.factory import build_engine
from chairlift.errors import ConfigError
from chairlift.events import EventList, RequestArrived
from chairlift.lab.bench.benchmark_result import BenchmarkResult, RunValues
from chairlift.lab.bench.driver import drive
from chairlift.lab.bench.throughput import ThroughputOptions, run_throughput
from chairlift.lab.bench.workload_options import WorkloadOptions, redraw_tokens
from chairlift.lab.metrics.requests import request_metrics
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.option_sources import read_options
from chairlift.slo import SLO
from support.tiny_tokenizer import add_tokenizer

TinyModel = Callable[..., Path]


def config(tiny_model_dir: TinyModel, **changes: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 4, "num_threads": 1}
    return EngineConfig(**{"model": str(tiny_model_dir("llama")), **defaults, **changes})


def write_trace(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=6), min_size=1, max_size=5), st.booleans())
def test_redrawn_tokens_share_the_same_prefixes(prompts: list[list[int]], as_bytes: bool) -> None:
    workload = [WorkloadRequest(str(i), 0.0, bytes(p) if as_bytes else p, 1) for i, p in enumerate(prompts)]
    redrawn = [list(request.prompt_token_ids) for request in redraw_tokens(workload, 0, 1, 300)]
    assert [len(prompt) for prompt in redrawn] == [len(prompt) for prompt in prompts]
    for one, new_one in zip(prompts, redrawn, strict=True):
        for other, new_other in zip(prompts, redrawn, strict=True):
            for length in range(1, 7):
                assert (one[:length] == other[:length]) == (new_one[:length] == new_other[:length])


def test_rounds_have_different_tokens() -> None:
    workload = [WorkloadRequest("a", 0.0, list(range(50)), 1), WorkloadRequest("b", 0.0, bytes(range(50)), 1)]
    rounds = [redraw_tokens(workload, 0, token_round, 300) for token_round in range(3)]
    for request in range(2):
        assert len({tuple(r[request].prompt_token_ids[:4]) for r in rounds}) == 3
    assert rounds[1] == redraw_tokens(workload, 0, 1, 300)


def test_a_token_outside_the_vocabulary_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'a' has token id 300, outside the vocabulary of vocab_size=300"):
        redraw_tokens([WorkloadRequest("a", 0.0, [300], 1)], 0, 1, 300)


def test_a_trace_keeps_its_times_unless_a_rate_is_given(tmp_path: Path) -> None:
    records = [{"arrival": time, "prompt_len": 3, "output_len": 2} for time in (5.0, 5.5, 9.0)]
    trace = write_trace(tmp_path / "t.jsonl", *records)
    options = WorkloadOptions(trace=trace)
    assert [item.arrival for item in options.workload(256, 0)] == [0.0, 0.5, 4.0]
    assert [item.arrival for item in replace(options, num_prompts=2).workload(256, 0)] == [0.0, 0.5]
    steady = replace(options, request_rate=10.0, burstiness=float("inf"))
    assert [item.arrival for item in steady.workload(256, 0)] == pytest.approx([0.0, 0.1, 0.2])
    at_once = replace(options, request_rate=float("inf"))
    assert [item.arrival for item in at_once.workload(256, 0)] == [0.0] * 3


def test_declared_lengths_are_reserved_and_true_lengths_run(tiny_model_dir: TinyModel) -> None:
    log = EventList()
    engine = build_engine(config(tiny_model_dir, kv="exact", skip_tokenizer_init=True), events=log)
    tokens = drive(
        engine,
        WorkloadOptions(num_prompts=3, output_len="fixed:5", input_len="fixed:6", max_tokens=20).workload(256, 0),
    )
    assert [len(ids) for ids in tokens.values()] == [5] * 3
    arrived = [event for event in log.events if isinstance(event, RequestArrived)]
    assert [(event.max_tokens, event.output_len) for event in arrived] == [(20, 5)] * 3


def test_max_tokens_below_the_output_length_is_rejected(tiny_model_dir: TinyModel) -> None:
    options = ThroughputOptions(num_prompts=2, output_len="fixed:9", max_tokens=8)
    with pytest.raises(ConfigError, match="max_tokens must be at least output_len=9, got 8"):
        run_throughput(config(tiny_model_dir), options)


def test_max_tokens_that_do_not_fit_are_rejected(tiny_model_dir: TinyModel) -> None:
    options = ThroughputOptions(num_prompts=2, input_len="fixed:9", output_len="fixed:9", max_tokens=800)
    with pytest.raises(
        ConfigError, match=r"\(9 prompt, 9 output tokens, max_tokens 800\) does not fit: max_tokens=800"
    ):
        run_throughput(config(tiny_model_dir), options)


def run_of(result: BenchmarkResult) -> RunValues:
    """The only run of the only engine."""
    ((run,),) = result.runs.values()
    return run


def test_a_closed_loop_keeps_its_limit(tiny_model_dir: TinyModel) -> None:
    log = EventList()
    engine = build_engine(config(tiny_model_dir, skip_tokenizer_init=True), events=log)
    workload = WorkloadOptions(num_prompts=7, input_len="uniform:3..9", output_len="uniform:2..8").workload(256, 0)
    drive(engine, workload, max_concurrency=2)
    requests = request_metrics(log.events)
    assert len(requests) == 7
    ends = sorted(request.token_times[-1] for request in requests)
    for index, request in enumerate(requests[2:]):
        assert request.arrival >= ends[index], "it arrives when another request has ended"
        assert request.ttft is not None
    options = ThroughputOptions(num_prompts=7, input_len="fixed:5", output_len="fixed:4", max_concurrency=2, repeats=1)
    assert run_of(run_throughput(config(tiny_model_dir), options))["peak_batch_size"] == 2


def test_equal_hashes_of_a_trace_are_found_in_the_cache(tiny_model_dir: TinyModel, tmp_path: Path) -> None:
    record = {"prompt_len": 20, "prompt_hashes": ["x"], "output_len": 9}
    trace = write_trace(tmp_path / "t.jsonl", {**record, "arrival": 0}, {**record, "arrival": 0.01})
    options = ThroughputOptions(trace=trace, repeats=1, num_warmups=2, max_concurrency=1)
    run = run_of(run_throughput(config(tiny_model_dir), options))
    assert (run["prompt_tokens"], run["cached_tokens"]) == (40, 16)


def test_a_trace_of_texts_is_tokenized_by_the_models_tokenizer(tiny_model_dir: TinyModel, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "custom.jsonl", {"prompt": "twelve bytes", "output_tokens": 3})
    folder = str(add_tokenizer(tiny_model_dir("llama"), tmp_path / "model"))
    options = ThroughputOptions(trace=trace, repeats=1, num_warmups=0)
    run = run_of(run_throughput(config(tiny_model_dir, model=folder), options))
    assert (run["prompt_tokens"], run["output_tokens"]) == (12, 3)
    with pytest.raises(ConfigError, match="a tokenizer is required to know its lengths"):
        run_throughput(config(tiny_model_dir, model=folder, skip_tokenizer_init=True), options)


def test_goodput_gives_every_request_an_slo() -> None:
    options = read_options(WorkloadOptions, {"goodput": ["ttft:100", "tpot:50"], "num-prompts": 2}, environment=False)
    assert [item.slo for item in options.workload(256, 0)] == [SLO(100, 50)] * 2
