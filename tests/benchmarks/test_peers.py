"""Comparisons with other engines, without a peer: equal work, exact lengths, figures and ratios."""

from __future__ import annotations

import io
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.peers import compare, figures, report
from benchmarks.peers.records import EngineRun, Job, PeerRequest, RequestTiming, run_job
from benchmarks.peers.stage import EngineSetting, RunFailedError, StageRunner
from benchmarks.peers.workers import export_w8a8
from benchmarks.peers.workload import PeerWorkload, copying_requests
from rich.console import Console

from chairlift.errors import ConfigError
from chairlift.lab.bench.machine import machine_facts
from chairlift.loading.resolve import resolve_model

SMALL = PeerWorkload(
    workloads=("prompt", "burst", "single"),
    prompt_len=9,
    num_prompts=5,
    input_len="fixed:6",
    output_len="uniform:2..4",
    single_input_len=5,
    single_output_len=3,
)


def finished(job: Job, seconds_per_token: float) -> EngineRun:
    """A run in which the tokens of a request are `seconds_per_token` apart."""

    def drive(requests: list[PeerRequest]) -> dict[str, RequestTiming]:
        times = [[seconds_per_token * (i + 1) for i in range(request.output_len)] for request in requests]
        return {r.request_id: RequestTiming(0.0, t) for r, t in zip(requests, times, strict=True)}

    return EngineRun(*run_job(job, drive), 1 << 20, {"version": "1"})


def test_both_engines_have_equal_requests_and_each_round_other_tokens() -> None:
    first, again, second = (SMALL.job({"any": name}, 100, number) for name, number in (("a", 0), ("b", 0), ("a", 1)))
    assert replace(first, options={}) == replace(again, options={})
    assert [r.output_len for r in first.burst] == [r.output_len for r in second.burst]
    prompts = [
        tuple(r.prompt_token_ids)
        for job in (first, second)
        for requests in (job.warm_up, job.prompt, job.burst, job.single)
        for r in requests
    ]
    assert len(set(prompts)) == len(prompts), "no prompt is in the prefix cache"
    assert [(len(r.prompt_token_ids), r.output_len) for r in first.single] == [(5, 3)] * SMALL.repeats
    assert [(len(r.prompt_token_ids), r.output_len) for r in first.prompt] == [(9, 1)] * SMALL.repeats
    lengths = [len(r.prompt_token_ids) + r.output_len for r in (*first.prompt, *first.burst, *first.single)]
    assert SMALL.max_model_len == max(lengths)


def test_prompts_of_a_burst_share_their_prefix_in_all_rounds() -> None:
    workload = replace(SMALL, workloads=("burst",), shared_prefix=20)
    first, second = (workload.job({"seats": 3}, 100, number) for number in range(2))
    requests = [*first.warm_up, *first.burst, *second.burst]
    assert len({tuple(request.prompt_token_ids[:20]) for request in requests}) == 1
    assert len({tuple(request.prompt_token_ids) for request in requests}) == len(requests)
    assert [job.options["has_prefix_cache"] for job in (first, SMALL.job({}, 100, 0))] == [True, False]


def test_warm_up_has_a_part_of_a_long_prompt() -> None:
    job = PeerWorkload(workloads=("prompt",), prompt_len=3000).job({}, 100, 0)
    assert [(len(request.prompt_token_ids), request.output_len) for request in job.warm_up] == [(2048, 1)]


def test_a_wrong_number_of_tokens_is_an_error() -> None:
    job = SMALL.job({}, 100, 0)
    run = finished(job, 0.5)
    figures.check_lengths("peer", job, run)
    short = job.burst[2]
    run.burst[short.request_id].token_times.pop()
    with pytest.raises(figures.WrongLengthError, match=f"{short.request_id} .*gave {short.output_len - 1} output"):
        figures.check_lengths("peer", job, run)
    del run.burst[short.request_id]
    with pytest.raises(figures.WrongLengthError, match="gave 0 output"):
        figures.check_lengths("peer", job, run)


def test_figures_of_a_run() -> None:
    burst = {"a": RequestTiming(10.0, [11.0, 11.5, 12.0]), "b": RequestTiming(10.0, [13.0, 14.0])}
    single = {"c": RequestTiming(20.0, [20.5, 20.7, 20.9]), "d": RequestTiming(30.0, [30.1, 30.2, 30.3])}
    prompt = {"e": RequestTiming(1.0, [1.5]), "f": RequestTiming(2.0, [2.25]), "g": RequestTiming(3.0, [4.0])}
    values = figures.run_figures(EngineRun(prompt, burst, single, 4096, {}), 100)
    assert values["prompt_tokens_per_s"] == pytest.approx(100 / 0.5)
    assert values["output_tokens_per_s"] == pytest.approx(5 / 4)
    assert values["e2e_p50"] == pytest.approx(3.0)
    assert values["ttft_p50"] == pytest.approx(2.0)
    assert values["ttft_p99"] == pytest.approx(2.98)
    assert values["itl_p50"] == pytest.approx(0.5)
    assert values["single_decode_tokens_per_s"] == pytest.approx((5 + 10) / 2)
    assert values["single_ttft"] == pytest.approx(0.3)
    assert values["peak_rss_bytes"] == 4096


def test_answers_that_are_not_streamed_have_no_ttft() -> None:
    burst = {"a": RequestTiming(0.0, [2.0, 2.0], is_streamed=False)}
    assert figures.run_figures(EngineRun({}, burst, {}, 1, {}), 100) == {
        "output_tokens_per_s": 1.0,
        "e2e_p50": 2.0,
        "e2e_p99": 2.0,
        "peak_rss_bytes": 1.0,
    }


def test_ratios_are_computed_within_a_round() -> None:
    rounds = [({"e2e_p50": 1.0, "ttft_p50": 1.0}, {"e2e_p50": 2.0}), ({"e2e_p50": 3.0}, {"e2e_p50": 1.0})]
    (comparison,) = figures.compare(rounds)
    assert comparison.figure.key == "e2e_p50"
    assert comparison.ratios == [0.5, 3.0]


def test_report_ends_with_one_json_line() -> None:
    setting = EngineSetting("best", "any_run", Path("python"), {"seats": 4}, {"THREADS": "2"})
    jobs = [SMALL.job({}, 100, number) for number in range(2)]
    ours = EngineSetting("Chairlift", "chairlift_run", Path("python"), {"flags": ["--max-num-seqs", "4"]})
    measured = report.MeasuredSetting(ours, setting)
    for job in jobs:
        measured.rounds.append((figures.run_figures(finished(job, 0.5), 9), figures.run_figures(finished(job, 1.0), 9)))
    measured.engines = ({"chairlift": "0"}, {"peer": "7.1"})
    out = io.StringIO()
    report.print_report("Peer", machine_facts(), SMALL, [measured], Console(file=out, width=200))
    text = out.getvalue()
    assert "peer 7.1: THREADS=2 seats=4" in text
    assert "--max-num-seqs 4" in text
    record = json.loads(text.splitlines()[-1])
    assert record["settings"][0]["ratios"]["output_tokens_per_s"] == {"rounds": [2.0, 2.0], "median": 2.0}
    assert record["settings"][0]["ratios"]["single_ttft"]["median"] == pytest.approx(0.5)
    assert record["settings"][0]["ratios"]["prompt_tokens_per_s"]["median"] == pytest.approx(2.0)
    assert record["settings"][0]["chairlift"] == ours.to_dict()
    assert record["workload"]["seed"] == SMALL.seed


def arguments(**given: object) -> Namespace:
    return Namespace(**{"chairlift": "", "seats": None, "num_threads": None, **given})


def test_options_of_chairlift_are_checked_before_anything_runs() -> None:
    setting = compare.chairlift_setting(arguments(chairlift="--block-size 8", seats=32), Path("m.gguf"))
    assert setting.options["flags"] == ["--block-size", "8", "--model", "m.gguf", "--max-num-seqs", "32"]
    with pytest.raises(ConfigError, match="--no-such"):
        compare.chairlift_setting(arguments(chairlift="--no-such 3"), Path("m.gguf"))
    with pytest.raises(ConfigError, match="max_num_seqs must be at least 1"):
        compare.chairlift_setting(arguments(chairlift="--max-num-seqs 0"), Path("m.gguf"))
    with pytest.raises(ConfigError, match="--max-num-seqs is given for both"):
        compare.chairlift_setting(arguments(chairlift="--max-num-seqs=8", seats=32), Path("m.gguf"))


def test_chairlift_runs_a_job_in_a_separate_process(
    tmp_path: Path, tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    flags = ["--model", str(tiny_model_dir("llama")), "--num-kv-blocks", "16", "--num-threads", "1"]
    setting = EngineSetting("Chairlift", "chairlift_run", Path(sys.executable), {"flags": flags})
    job = SMALL.job(setting.options, 256, 0)
    run = StageRunner(state=tmp_path).run(setting, job, opponent="peer")
    values = figures.run_figures(run, SMALL.prompt_len)
    assert all(values[figure.key] > 0 for figure in figures.FIGURES)
    assert run.engine["enable_prefix_caching"] is False
    failing = StageRunner(prefix=["false"], state=tmp_path)
    assert failing.run(setting, job, opponent="peer") == run, "a finished run is not repeated"
    with pytest.raises(RunFailedError, match="exit code 1"):
        failing.run(setting, job, opponent="other")


def test_w8a8_has_all_linear_layers_of_models_with_recurrent_layers() -> None:
    layers = ("self_attn.q_proj", "linear_attn.in_proj_qkv", "linear_attn.in_proj_b", "conv.in_proj", "feed_forward.w1")
    for layer in layers:
        name = f"model.layers.0.{layer}.weight"
        assert set(export_w8a8.quantize(name, torch.ones(2, 3))) == {name, f"{name}_scale"}
    for name in (
        "model.embed_tokens.weight",
        "model.layers.0.conv.conv.weight",
        "model.layers.0.linear_attn.conv1d.weight",
    ):
        assert set(export_w8a8.quantize(name, torch.ones(2, 3))) == {name}


def test_copying_requests_repeat_a_text_of_the_prompt(smollm2_gguf: Path) -> None:
    files = resolve_model(str(smollm2_gguf))
    requests = copying_requests(files, 3)
    tokenizer = files.tokenizer()
    assert len({tuple(request.prompt_token_ids) for request in requests}) == 3
    for request in requests:
        prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        assert prompt.endswith("<|im_start|>assistant\n")
        assert len(request.prompt_token_ids) > request.output_len > 40
    workload = PeerWorkload(copying=requests)
    assert workload.job({}, 100, 0).single == workload.job({}, 100, 1).single == list(requests)
    assert workload.to_dict()["copying"] == 3
