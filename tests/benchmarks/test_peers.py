"""Comparisons with other engines, without a peer: equal work, exact lengths, figures and ratios."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.peers import compare, figures, llamacpp, report
from benchmarks.peers.environment import SetupError, environment
from benchmarks.peers.records import EngineRun, Job, PeerRequest, RequestTiming, run_job
from benchmarks.peers.stage import EngineSetting, RunFailedError, StageRunner
from benchmarks.peers.workload import PeerWorkload
from rich.console import Console

from chairlift.errors import ConfigError
from chairlift.lab.bench.machine import machine_facts

SMALL = PeerWorkload(
    num_prompts=5, input_len="fixed:6", output_len="uniform:2..4", single_input_len=5, single_output_len=3
)


def finished(job: Job, seconds_per_token: float) -> EngineRun:
    """A run in which the tokens of a request are `seconds_per_token` apart."""

    def drive(requests: list[PeerRequest]) -> dict[str, RequestTiming]:
        times = [[seconds_per_token * (i + 1) for i in range(request.output_len)] for request in requests]
        return {r.request_id: RequestTiming(0.0, t) for r, t in zip(requests, times, strict=True)}

    return EngineRun(*run_job(job, drive), 1 << 20, {"version": "1"})


def test_both_engines_have_equal_requests_and_each_round_other_tokens() -> None:
    first, again, second = (SMALL.job({"any": name}, 100, number) for name, number in (("a", 0), ("b", 0), ("a", 1)))
    assert (first.warm_up, first.burst, first.single) == (again.warm_up, again.burst, again.single)
    assert [r.output_len for r in first.burst] == [r.output_len for r in second.burst]
    prompts = [tuple(r.prompt_token_ids) for job in (first, second) for r in (*job.warm_up, *job.burst, *job.single)]
    assert len(set(prompts)) == len(prompts), "no prompt is in the prefix cache"
    assert [(len(r.prompt_token_ids), r.output_len) for r in first.single] == [(5, 3)] * SMALL.single_repeats
    assert SMALL.max_model_len == max(len(r.prompt_token_ids) + r.output_len for r in (*first.burst, *first.single))


def test_a_job_has_only_the_selected_workloads() -> None:
    job = PeerWorkload(workloads=("single",)).job({}, 100, 0)
    assert job.burst == []
    assert len(job.single) == 3


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    job = SMALL.job({"seats": 3}, 100, 0)
    run = finished(job, 0.5)
    job.write(tmp_path / "job.json")
    run.write(tmp_path / "run.json")
    assert Job.read(tmp_path / "job.json") == job
    assert EngineRun.read(tmp_path / "run.json") == run


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
    values = figures.run_figures(EngineRun(burst, single, 4096, {}))
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
    assert figures.run_figures(EngineRun(burst, {}, 1, {})) == {
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
    measured = report.MeasuredSetting(setting)
    for job in jobs:
        measured.rounds.append((figures.run_figures(finished(job, 0.5)), figures.run_figures(finished(job, 1.0))))
    measured.engines = ({"chairlift": "0"}, {"peer": "7.1"})
    out = io.StringIO()
    ours = EngineSetting("Chairlift", "chairlift_run", Path("python"), {"flags": ["--max-num-seqs", "4"]})
    report.print_report("Peer", machine_facts(), SMALL, ours, [measured], Console(file=out, width=200))
    text = out.getvalue()
    assert "peer 7.1: THREADS=2 seats=4" in text
    assert "--max-num-seqs 4" in text
    record = json.loads(text.splitlines()[-1])
    assert record["settings"][0]["ratios"]["output_tokens_per_s"] == {"rounds": [2.0, 2.0], "median": 2.0}
    assert record["settings"][0]["ratios"]["single_ttft"]["median"] == pytest.approx(0.5)
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
    values = figures.run_figures(run)
    assert all(values[figure.key] > 0 for figure in figures.FIGURES)
    assert run.engine["enable_prefix_caching"] is False
    failing = StageRunner(prefix=["false"], state=tmp_path)
    assert failing.run(setting, job, opponent="peer") == run, "a finished run is not repeated"
    with pytest.raises(RunFailedError, match="exit code 1"):
        failing.run(setting, job, opponent="other")


def test_an_existing_environment_is_not_changed(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    (tmp_path / "requirements.json").write_text(json.dumps(["peer>=1", "not other"]))
    assert environment(tmp_path, ["peer>=1"], unwanted=["other"]) == python
    with pytest.raises(SetupError, match="exit code 3"):
        environment(tmp_path, ["peer>=2"], unwanted=["other"])


def test_only_llama_cpp_is_extracted_from_the_sdist(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz") as archive:
        for name in ("p-1/setup.py", "p-1/vendor/llama.cpp/src/a.c", "p-1/vendor/other/b.c", "p-1/vendor/llama.cpp.md"):
            archive.addfile(tarfile.TarInfo(name))
    with tarfile.open(tmp_path / "sdist.tar.gz") as archive:
        assert [member.name for member in llamacpp.source_members(archive)] == ["p-1/vendor/llama.cpp/src/a.c"]


def test_each_slot_of_llama_server_has_room_for_the_longest_request() -> None:
    context = compare.PeerContext(arguments(num_threads=3, server_args="-fa off"), Path("m.gguf"), SMALL)
    command = llamacpp.server_command(context, Path("bin"), Path("m.gguf"), seats=4)
    given = dict(zip(command[1::2], command[2::2], strict=False))
    assert command[:3] == ["bin/llama-server", "--model", "m.gguf"]
    assert int(given["--ctx-size"]) >= int(given["--parallel"]) * SMALL.max_model_len
    assert given["--threads"] == "3"
    assert command[-2:] == ["-fa", "off"]
