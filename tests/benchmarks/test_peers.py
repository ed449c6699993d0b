"""Comparisons with other engines, without a peer: equal work, exact lengths, figures and ratios."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.peers import compare, convert, figures, llamacpp, openvino, report, vllm
from benchmarks.peers.environment import SetupError, environment
from benchmarks.peers.records import EngineRun, Job, PeerRequest, RequestTiming, run_job
from benchmarks.peers.stage import EngineSetting, RunFailedError, StageRunner
from benchmarks.peers.workers import export_w8a8
from benchmarks.peers.workload import PeerWorkload, copying_requests
from rich.console import Console

from chairlift.errors import ConfigError
from chairlift.lab.bench.machine import machine_facts
from chairlift.loading.model_source import FolderSource, GGUFSource
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


def test_a_job_has_only_the_selected_workloads() -> None:
    job = PeerWorkload(workloads=("single",)).job({}, 100, 0)
    assert (job.prompt, job.burst) == ([], [])
    assert len(job.single) == 3


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


def peer_context(model: Path, **given: object) -> compare.PeerContext:
    files = (GGUFSource if model.suffix == ".gguf" else FolderSource)(model, model.name)
    return compare.PeerContext(arguments(folder=Path("peers"), **given), files, SMALL)


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
    context = peer_context(Path("m.gguf"), num_threads=3, server_args="-fa off")
    command = llamacpp.server_command(context, Path("bin"), Path("m.gguf"), seats=4)
    given = dict(zip(command[1::2], command[2::2], strict=False))
    assert command[:3] == ["bin/llama-server", "--model", "m.gguf"]
    assert int(given["--ctx-size"]) >= int(given["--parallel"]) * SMALL.max_model_len
    assert given["--threads"] == "3"
    assert command[-2:] == ["-fa", "off"]


def test_chairlift_reads_the_file_of_llama_server_if_the_model_is_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "build", lambda *_: Path("bin"))
    monkeypatch.setattr(llamacpp, "requantize", lambda context, programs, weights: Path(f"{weights}.gguf"))
    options = {"weights": "Q4_0,Q8_0", "server_args": "", "seats": 2, "peer_seats": None}
    from_folder = llamacpp.settings(peer_context(Path("folder"), **options))
    assert [setting.chairlift_model for setting in from_folder] == [Path("Q4_0.gguf"), Path("Q8_0.gguf")]
    assert [setting.options["command"][2] for setting in from_folder] == ["Q4_0.gguf", "Q8_0.gguf"]
    from_file = llamacpp.settings(peer_context(Path("m.gguf"), **options))
    assert [setting.chairlift_model for setting in from_file] == [None, None]


def test_formats_of_a_folder_are_made_from_its_bfloat16_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[object], folder: Path | None = None) -> None:
        words = [str(word) for word in command]
        commands.append(words)
        for word in words:
            if word.endswith(".part"):
                Path(word).write_text("made", encoding="utf-8")

    monkeypatch.setattr(llamacpp, "run", run)
    monkeypatch.setattr(llamacpp, "environment", lambda *_: Path("python"))
    context = peer_context(Path("folder"))
    context.arguments.folder = tmp_path
    made = [llamacpp.requantize(context, Path("bin"), weights) for weights in ("Q4_0", "BF16", "Q4_0")]
    q4_0, bf16 = (tmp_path / "models" / f"folder-{weights}.gguf" for weights in ("Q4_0", "BF16"))
    assert made == [q4_0, bf16, q4_0]
    convert_command, quantize_command = commands
    assert convert_command[2:] == ["folder", "--outtype", "bf16", "--outfile", str(bf16.with_suffix(".part"))]
    assert quantize_command[2:] == [str(bf16), str(q4_0.with_suffix(".part")), "Q4_0"]


def test_a_folder_is_not_converted_for_transformers() -> None:
    assert convert.hf_folder(peer_context(Path("folder")), Path("no-python")) == Path("folder")


def test_openvino_reads_gguf_only_from_a_gguf_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino, "environment", lambda *_: Path("python"))
    monkeypatch.setattr(openvino, "ir_folder", lambda _, weights: Path(weights))
    options = {"token_budget": 1, "cache_gb": 1, "seats": None, "peer_seats": 4, "prompt_lookup": None}
    folder, file = (peer_context(Path(name), weights=None, **options) for name in ("folder", "m.gguf"))
    assert [setting.options["model"] for setting in openvino.settings(folder)] == ["int8", "fp16"]
    assert [setting.options["model"] for setting in openvino.settings(file)] == ["int8", "m.gguf"]
    folder.arguments.weights = "gguf"
    with pytest.raises(ConfigError, match=r"folder is no \.gguf file"):
        openvino.settings(folder)


def test_openvino_exports_each_architecture_with_the_transformers_that_its_exporter_supports(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[tuple[str, ...]] = []
    monkeypatch.setattr(openvino, "environment", lambda _, given, unwanted: installed.append(given) or Path("python"))
    monkeypatch.setattr(openvino, "run", lambda _: None)
    for name in ("llama", "qwen3_5"):
        openvino.ir_folder(peer_context(tiny_model_dir(name)), "int8")
    assert [next(each for each in given if each.startswith("transformers")) for given in installed] == [
        "transformers<5.1",
        "transformers==5.2.*",
    ]


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


def test_vllm_computes_in_the_data_type_of_the_folder(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "environment", lambda *_: Path("env/bin/python"))
    monkeypatch.setattr(vllm, "hf_folder", lambda *_: Path("float32"))
    monkeypatch.setattr(vllm, "w8a8_folder", lambda *_: Path("w8a8"))
    options = {"weights": None, "token_budget": 1, "kv_gib": 1, "seats": 4, "peer_seats": None, "zen": False}
    model = tiny_model_dir("llama")
    with_zentorch = vllm.settings(peer_context(model, **options | {"zen": True}))
    assert [each.label for each in with_zentorch] == [
        f"{weights}, 4 seats, token budget 1, zentorch" for weights in ("w8a8", "float32")
    ]
    settings = vllm.settings(peer_context(model, **options)), vllm.settings(peer_context(Path("m.gguf"), **options))
    given = [[(s.options["model"], s.options["dtype"]) for s in of_model] for of_model in settings]
    dtype = json.loads((model / "config.json").read_text())["dtype"]
    assert given == [[("w8a8", dtype), ("float32", dtype)], [("w8a8", "float32"), ("float32", "float32")]]
    assert "env/lib/libiomp5.so" in settings[0][0].variables["LD_PRELOAD"]


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
