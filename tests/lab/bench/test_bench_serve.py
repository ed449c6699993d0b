"""`bench serve` over a socket against a Chairlift server with a tiny random model."""

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


def check_record(record: RequestRecord) -> None:
    assert record.failure is None
    assert record.usage is not None
    assert record.usage.prompt_tokens == record.input_len
    assert record.usage.completion_tokens == record.num_output_tokens == record.output_len
    assert record.finish_reason == "length"
    assert 0 <= record.due <= record.sent < record.chunk_times[0] <= record.chunk_times[-1] <= record.ended


def test_every_request_is_answered_and_counted(server: RunningServer) -> None:
    load = options(server, num_warmups=2, goodput=("ttft:60000 e2el:60000",))
    result = run_serve(load)
    for record in result.records:
        check_record(record)
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
    assert metrics.cached_tokens == 0, "the warm-up has other tokens"
    server.wait_until_idle()


def test_arrivals_follow_the_rate_and_are_not_part_of_latencies(server: RunningServer) -> None:
    result = run_serve(options(server, num_prompts=5, request_rate=20.0, burstiness=float("inf")))
    assert [record.due for record in result.records] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert result.metrics.duration >= 0.2
    assert all(record.sent >= record.due for record in result.records)


def test_a_closed_loop_keeps_its_limit(server: RunningServer) -> None:
    result = run_serve(options(server, max_concurrency=2))
    assert result.metrics.completed == 6
    assert result.metrics.max_concurrent_requests == 2
    ends = sorted(record.ended for record in result.records)
    for index, record in enumerate(sorted(result.records, key=lambda record: record.due)[2:]):
        assert record.due >= ends[index], "due when another request had ended"


def test_chat_reports_the_counts_of_the_server(server: RunningServer) -> None:
    result = run_serve(options(server, backend="openai-chat", input_len="fixed:5"))
    assert result.metrics.completed == 6
    assert result.metrics.total_output_tokens == sum(record.output_len for record in result.records)
    assert result.metrics.requested_input_tokens == 30
    assert result.metrics.total_input_tokens > 30, "here a letter is a token"
    assert result.prompt_format == "messages"


def test_conversations_continue_after_the_previous_answer(server: RunningServer, tmp_path: Path) -> None:
    first = {"request_id": "a", "arrival": 0, "prompt_len": 6, "output_len": 4}
    second = {**first, "request_id": "b", "arrival": 0.05, "after": "a", "carries_history": True}
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(record) + "\n" for record in (first, second)))
    for backend in ("openai", "openai-chat"):
        load = options(server, trace=trace, num_prompts=None, input_len=None, output_len=None)
        result = run_serve(replace(load, backend=backend))
        before, after = result.records
        assert result.metrics.completed == 2
        assert after.due >= before.ended + 0.05
        assert after.input_len == 6 + 4 + 6
        if backend == "openai":
            check_record(after)


def test_the_report_and_the_saved_result(server: RunningServer, tmp_path: Path) -> None:
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
    arguments = ["bench", "serve", *flags, *lengths, *chosen, "--save-result", str(saved)]
    table = CliRunner().invoke(app, arguments).stdout
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    results = record["results"]
    assert record["workload"]["request_rate"] == "inf"
    assert results["completed"] == 4
    assert results["request_goodput"] == pytest.approx(results["request_throughput"])
    assert 0 < results["p50_ttft_ms"] <= results["p95_ttft_ms"]
    assert results["p50_e2el_ms"] == pytest.approx(results["median_e2el_ms"])
    assert "mean_itl_ms" not in results
    assert {"mean_send_lag_ms", "p95_send_lag_ms", "max_send_lag_ms"} <= results.keys()
    for label in ("goodput", "TTFT", "E2E latency", "send lag", "counted by the server in 4 answers"):
        assert label in table, label
    detailed = json.loads(saved.read_text())
    requests = detailed.pop("requests")
    assert detailed == record
    assert [request["usage"]["completion_tokens"] for request in requests] == [4] * 4


def test_the_api_key_is_not_written(server: RunningServer) -> None:
    result = run_serve(options(server, num_prompts=1), api_key="secret-key")
    out = io.StringIO()
    print_serve(result, out)
    print_serve(result, out, as_json=True)
    assert "secret-key" not in out.getvalue() + json.dumps(result.to_detailed_dict())


def test_an_unknown_model_is_rejected_before_the_workload(server: RunningServer) -> None:
    with pytest.raises(ConfigError, match=r"'other', failed.*ids: http 404: model 'other' is not served here"):
        run_serve(options(server, model="other"))


def test_an_unreachable_server_is_reported() -> None:
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
        ({"tokenizer": "x"}, "tokenizer=x needs a trace"),
        ({"percentile_metrics": ("ttft", "mood")}, "percentile_metrics must be among ttft, .*, got mood"),
        ({"metric_percentiles": (101.0,)}, "metric_percentiles must be in 0..100, got 101"),
        ({"timeout": 0.0}, "timeout must be a positive number"),
        ({"goodput": ("ttft",)}, "goodput 'ttft': '' is not a positive number of milliseconds; write ttft:MS"),
        ({"trace": Path("t.csv"), "input_len": "fixed:3"}, "input_len=fixed:3 cannot be combined with trace"),
    ],
)
def test_errors_name_the_option(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ServeOptions(**changes)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_invalid_urls_are_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        run_serve(ServeOptions(base_url=url))
