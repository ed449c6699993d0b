"""`bench throughput` on a tiny random model, from the options to the JSON line, and the facts about the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import chairlift
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.events import RequestArrived, read_events
from chairlift.lab.bench.benchmark_result import BenchmarkResult, RunValues
from chairlift.lab.bench.machine import _cpu, machine_facts, peak_rss_bytes
from chairlift.lab.bench.throughput import ThroughputOptions, run_throughput
from chairlift.lab.metrics.run import REPORTED_METRICS

TinyModel = Callable[..., Path]
OPTIONS = ThroughputOptions(num_prompts=6, input_len="uniform:5..40", output_len="uniform:2..9", repeats=2)


def config(tiny_model_dir: TinyModel, **changes: Any) -> EngineConfig:
    return EngineConfig(model=str(tiny_model_dir("llama")), num_threads=1, **{"num_kv_blocks": 64, **changes})


def runs_of(result: BenchmarkResult) -> Sequence[RunValues]:
    (runs,) = result.runs.values()
    return runs


def test_a_burst_is_measured_in_every_run(tiny_model_dir: TinyModel) -> None:
    result = run_throughput(config(tiny_model_dir), OPTIONS)
    workload = OPTIONS.workload(256, token_round=1)
    runs = runs_of(result)
    assert len(runs) == 2
    num_output = sum(request.output_len for request in workload)
    for run in runs:
        assert run["cached_tokens"] == 0, "the runs have different tokens"
        rates = [run[key] or 0.0 for key in ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")]
        num_prompt = sum(len(request.prompt_token_ids) for request in workload)
        assert rates[1] / rates[0] == pytest.approx(num_output / 6)
        assert rates[2] / rates[1] == pytest.approx(1 + num_prompt / num_output)
        assert 0 < (run["kv_use_mean"] or 0) <= (run["kv_use_peak"] or 0) <= 1
    speed = result.spread(result.baseline, "output_tokens_per_s")
    assert speed is not None
    assert 0 < speed.min <= speed.median <= speed.max
    assert result.engines[result.baseline].num_blocks == 64


def test_a_small_pool_preempts(tiny_model_dir: TinyModel) -> None:
    options = ThroughputOptions(num_prompts=6, input_len="fixed:20", output_len="fixed:24", repeats=1, num_warmups=0)
    (run,) = runs_of(run_throughput(config(tiny_model_dir, num_kv_blocks=9, block_size=8), options))
    assert (run["preemptions"] or 0) > 0
    assert run["kv_use_peak"] == 1.0


def test_arrivals_follow_the_request_rate(tiny_model_dir: TinyModel) -> None:
    options = ThroughputOptions(
        num_prompts=5, input_len="fixed:8", output_len="fixed:2", request_rate=20, burstiness=1e6, repeats=1
    )
    (run,) = runs_of(run_throughput(config(tiny_model_dir), options))
    assert 0 < (run["requests_per_s"] or 0) <= 5 / (4 / 20 * 0.95), "the last one arrives after four gaps"


def test_the_report_has_a_table_and_one_json_line(
    tiny_model_dir: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "events.jsonl"
    result = run_throughput(config(tiny_model_dir, event_log=log), OPTIONS)
    result.print()
    result.print(True)
    *table, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    assert record["workload"]["input_len"] == "uniform:5..40"
    (system,) = record["systems"].values()
    assert system["engine"]["num_blocks"] == 64
    assert record["machine"] == asdict(result.machine)
    assert set(system["results"]) == {metric.key for metric in REPORTED_METRICS}
    assert system["results"]["output_tokens_per_s"]["median"] > 0
    assert len(system["runs"]) == 2
    for label in ("output tokens/s", "TTFT p99, s", "ITL p50, ms", "preemptions"):
        assert any(label in line for line in table), label
    assert len([event for event in read_events(log) if isinstance(event, RequestArrived)]) == 4 + 2 * 6, "with warm-up"


def test_a_workload_that_does_not_fit_is_rejected(tiny_model_dir: TinyModel) -> None:
    options = ThroughputOptions(num_prompts=2, input_len="fixed:200", output_len="fixed:100")
    with pytest.raises(ConfigError, match=r"\(200 prompt, 100 output tokens\) does not fit: max_tokens=100.*narrow"):
        run_throughput(config(tiny_model_dir), options)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_prompts": 0}, "num_prompts must be at least 1, got 0"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"num_warmups": -1}, "num_warmups must be at least 0, got -1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"input_len": "sometimes:3"}, "unknown distribution 'sometimes'"),
        ({"output_len": "fixed:x"}, "write fixed:LENGTH"),
        ({"request_rate": -2.0}, "request_rate must be a positive number, got -2.0"),
        ({"burstiness": 2.0}, "burstiness=2 .* set a request_rate"),
    ],
)
def test_errors_name_the_option(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ThroughputOptions(**changes)


CPUINFO = """\
processor\t: 0
model name\t: Made Up CPU @ 2.00GHz
flags\t\t: fpu sse2 avx2 avx512f avx512_vnni

processor\t: 1
model name\t: Another CPU
flags\t\t: fpu
"""


def test_facts() -> None:
    facts = machine_facts()
    assert facts.chairlift == chairlift.__version__
    assert facts.num_cores >= 1
    assert facts.memory_bytes > 1 << 28
    assert json.loads(json.dumps(asdict(facts)))["torch"] == facts.torch


def test_the_first_cpu_speaks_for_all_and_may_be_unknown(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    assert _cpu(tmp_path / "cpuinfo") == ("Made Up CPU @ 2.00GHz", ["avx2", "avx512f", "avx512_vnni"])
    name, flags = _cpu(tmp_path / "missing")
    assert name
    assert flags == []


PEAK = """
from chairlift.lab.bench.machine import peak_rss_bytes
before = peak_rss_bytes()
ballast = b"x" * (before + (8 << 20))
del ballast
print(before, peak_rss_bytes())
"""


def test_peak_memory_only_grows() -> None:
    """In a process that is small enough to be doubled; what the one that starts it has held is not its own."""
    own = peak_rss_bytes()
    said = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout
    before, after = map(int, said.split())
    assert before < own, "no torch in there"
    assert after >= before + (8 << 20)
