"""bench serve over a real socket against our own server with a tiny random model."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chairlift import AsyncLLM
from chairlift.cli.main import app
from chairlift.errors import ConfigError
from chairlift.lab.bench.serving.benchmark import ServeOptions, run_serve
from chairlift.lab.bench.serving.http_client import RequestRecord
from chairlift.lab.bench.serving.tables import print_serve
from running_server import RunningServer, run_server
from tiny_tokenizer import add_tokenizer


@pytest.fixture(scope="module")
def server(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = add_tokenizer(tiny_model_dir("llama"), tmp_path_factory.mktemp("words"))
    with run_server(AsyncLLM(model=str(folder), num_kv_blocks=64, num_threads=1, max_num_seqs=4), "tiny") as running:
        yield running


def options(server: RunningServer, **changes: Any) -> ServeOptions:
    defaults: dict[str, Any] = {"num_prompts": 6, "input_len": "uniform:4..9", "output_len": "uniform:3..7"}
    return ServeOptions(base_url=server.url, vocab_size=256, **{**defaults, **changes})


def check_call(call: RequestRecord) -> None:
    assert call.failure is None
    assert call.usage is not None
    assert call.usage.prompt_tokens == call.input_len
    assert call.usage.completion_tokens == call.num_output_tokens == call.output_len
    assert call.finish_reason == "length"
    assert 0 <= call.due <= call.sent < call.chunk_times[0] <= call.chunk_times[-1] <= call.ended


def test_every_request_is_answered_and_counted(server: RunningServer) -> None:
    load = options(server, num_warmups=2, goodput=("ttft:60000 e2el:60000",))
    result = run_serve(load)
    for call in result.calls:
        check_call(call)
    metrics = result.metrics
    workload = load.workload(256, 1)
    assert result.model == "tiny"
    assert result.prompt_format == "ids"
    assert (metrics.completed, metrics.failed) == (6, 0)
    assert (
        metrics.total_input_tokens == metrics.requested_input_tokens == sum(len(r.prompt_token_ids) for r in workload)
    )
    assert metrics.total_output_tokens == sum(r.output_len for r in workload)
    assert metrics.num_counted_by_usage == 6
    assert metrics.num_short == 0
    assert metrics.request_goodput == pytest.approx(metrics.request_throughput) == pytest.approx(6 / metrics.duration)
    assert metrics.max_concurrent_requests == 6
    assert metrics.cached_tokens == 0, "the warm-up has tokens of its own"
    server.wait_until_idle()


def test_arrivals_take_their_time_and_latency_does_not_count_it(server: RunningServer) -> None:
    result = run_serve(options(server, num_prompts=5, request_rate=20.0, burstiness=float("inf")))
    assert [call.due for call in result.calls] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert result.metrics.duration >= 0.2
    assert all(call.sent >= call.due for call in result.calls)


def test_a_closed_loop_keeps_its_limit(server: RunningServer) -> None:
    result = run_serve(options(server, max_concurrency=2))
    assert result.metrics.completed == 6
    assert result.metrics.max_concurrent_requests == 2
    ends = sorted(call.ended for call in result.calls)
    for index, call in enumerate(sorted(result.calls, key=lambda call: call.due)[2:]):
        assert call.due >= ends[index], "due when a place became free, not before"


def test_chat_says_what_the_server_counted(server: RunningServer) -> None:
    result = run_serve(options(server, backend="openai-chat", input_len="fixed:5"))
    assert result.metrics.completed == 6
    assert result.metrics.total_output_tokens == sum(call.output_len for call in result.calls)
    assert result.metrics.requested_input_tokens == 30
    assert result.metrics.total_input_tokens > 30, "here a letter is a token"
    assert result.prompt_format == "messages"


def test_conversations_follow_each_other(server: RunningServer, tmp_path: Path) -> None:
    first = {"request_id": "a", "arrival": 0, "prompt_len": 6, "output_len": 4}
    second = {**first, "request_id": "b", "arrival": 0.05, "after": "a", "carries_history": True}
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(record) + "\n" for record in (first, second)))
    for backend in ("openai", "openai-chat"):
        load = options(server, trace=trace, num_prompts=None, input_len=None, output_len=None)
        result = run_serve(replace(load, backend=backend))
        before, after = result.calls
        assert result.metrics.completed == 2
        assert after.due >= before.ended + 0.05
        assert after.input_len == 6 + 4 + 6
        if backend == "openai":
            check_call(after)


def test_the_report(server: RunningServer, tmp_path: Path) -> None:
    flags = ["--base-url", f"{server.url}/v1/", "--vocab-size", "256", "--num-prompts", "4"]
    lengths = ["--input-len", "fixed:5", "--output-len", "fixed:4", "--request-rate", "inf"]
    chosen = [
        "--goodput",
        "ttft:60000",
        "tpot:60000",
        "--percentile-metrics",
        "ttft,e2el",
        "--metric-percentiles",
        "50,95",
    ]
    saved = tmp_path / "result.json"
    result = CliRunner().invoke(app, ["bench", "serve", *flags, *lengths, *chosen, "--save-result", str(saved)])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout.splitlines()[-1])
    results = record["results"]
    assert record["workload"]["request_rate"] == "inf"
    assert results["completed"] == 4
    assert results["request_goodput"] == pytest.approx(results["request_throughput"])
    assert 0 < results["p50_ttft_ms"] <= results["p95_ttft_ms"]
    assert results["p50_e2el_ms"] == pytest.approx(results["median_e2el_ms"])
    assert "mean_itl_ms" not in results
    assert {"mean_send_lag_ms", "p95_send_lag_ms", "max_send_lag_ms"} <= results.keys()
    for label in ("goodput", "TTFT", "E2E latency", "send lag", "counted by the server in 4 answers"):
        assert label in result.stdout, label
    detailed = json.loads(saved.read_text())
    requests = detailed.pop("requests")
    assert detailed == record
    assert [request["usage"]["completion_tokens"] for request in requests] == [4] * 4


def test_the_key_is_sent_and_never_written(server: RunningServer) -> None:
    result = run_serve(options(server, num_prompts=1), api_key="secret-key")
    out = io.StringIO()
    print_serve(result, out)
    assert "secret-key" not in out.getvalue() + json.dumps(result.to_detailed_dict())


def test_a_name_that_is_not_served_ends_before_the_load(server: RunningServer) -> None:
    with pytest.raises(ConfigError, match=r"'other', got no answer.*ids: http 404: model 'other' is not served here"):
        run_serve(options(server, model="other"))


def test_nobody_there() -> None:
    with pytest.raises(ConfigError, match=r"no answer from http://127.0.0.1:1/v1/models: .*Is the server running"):
        run_serve(ServeOptions(base_url="http://127.0.0.1:1"))


def test_the_client_loads_no_torch() -> None:
    code = (
        "import sys, chairlift.lab.bench.serving.tables; print([m for m in ('torch', 'fastapi') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"backend": "grpc"}, "backend must be one of openai, openai-chat, got 'grpc'"),
        ({"num_warmups": -1}, "num_warmups must be at least 0, got -1"),
        ({"max_concurrency": 0}, "max_concurrency must be at least 1, got 0"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"max_tokens": 9}, "max_tokens=9 needs ignore_eos=False"),
        ({"tokenizer": "x"}, "tokenizer=x is for the texts of a trace"),
        ({"percentile_metrics": ("ttft", "mood")}, "percentile_metrics must be among ttft, .*, got mood"),
        ({"metric_percentiles": (101.0,)}, "metric_percentiles must be in 0..100, got 101"),
        ({"timeout": 0.0}, "timeout must be a positive number"),
        ({"goodput": ("ttft",)}, "goodput 'ttft': '' is no positive number of milliseconds; write ttft:MS"),
        ({"trace": Path("t.csv"), "input_len": "fixed:3"}, "input_len=fixed:3 is for a synthetic load"),
    ],
)
def test_bad_options(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ServeOptions(**changes)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        run_serve(ServeOptions(base_url=url))
