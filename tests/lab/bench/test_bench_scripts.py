"""The scripts in benchmarks/ on a tiny random model."""

from __future__ import annotations

import importlib.util
import json
import platform
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.http_cost import ServeProcess

from byte_tokenizer import VOCAB_SIZE, with_byte_tokenizer
from chairlift.errors import ConfigError
from chairlift.models import decoder
from chairlift.worker import model_runner
from chairlift.worker.token_masks import TokenMasks
from native import needs_native

TinyModel = Callable[..., Path]
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_profile_step(tiny_model_dir: TinyModel) -> None:
    profile = script("profile_step")
    get_kernels, gather = vars(decoder)["get_kernels"], vars(model_runner)["gather_input_batch"]
    timer = profile.SectionTimer()
    config = profile.engine_config(str(tiny_model_dir("llama")), [1, 3], 20, 5, 1)
    engine = profile.timed_engine(config, timer)
    for batch_size in (1, 3):
        measured = profile.decode_steps(engine, timer, batch_size, 20, 5)
        assert len(measured) == 5
        assert all(seconds > 0 for step in measured for seconds in step.values()), "every section has a time"
    rows = profile.milliseconds(measured)
    assert 0 < rows["outside the model"] < rows["step"]
    assert vars(decoder)["get_kernels"] is get_kernels
    assert vars(model_runner)["gather_input_batch"] is gather


def test_profile_of_a_kernel_set(tiny_model_dir: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    profile = script("profile_step")
    sizes = ["--batch-sizes", "1,2", "--context", "20", "--steps", "3", "--rounds", "2", "--num-threads", "1"]
    arguments = ["--model", str(tiny_model_dir("opt")), "--kernels", "torch", "--json", *sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["profile_step.py", *arguments])
        profile.main()
    milliseconds = json.loads(capsys.readouterr().out)["results"]
    assert list(milliseconds) == ["torch"]
    for by_batch_size in milliseconds.values():
        assert list(by_batch_size) == ["1", "2"]
        assert all(value > 0 for sections in by_batch_size.values() for value in sections.values())


def test_thread_scaling_extends_measured_speeds_to_more_threads() -> None:
    scaling = script("thread_scaling")
    work = scaling.StepWork(num_bytes=8e9, operations=1e9, num_jobs=10)
    model = scaling.Scaling(read={1: 10e9, 2: 18e9}, rate={1: 1e12, 2: 2e12}, barrier={1: 0.0, 2: 1e-6})
    assert [work.num_barriers(rows) for rows in (4, 5)] == [10, 20]
    assert model.seconds(work, 1, 1) == 0.8, "one row reads all weights"
    assert model.seconds(work, 4, 10) == pytest.approx(8 / 82 + 10 * 9e-6)
    assert model.seconds(work, 1000, 10) == pytest.approx(0.1 + 20 * 9e-6), "many rows compute"
    assert replace(model, read_limit=20e9).seconds(work, 1, 10) == pytest.approx(0.4 + 10 * 9e-6)


@needs_native
def test_thread_scaling_compares_measured_with_predicted_steps(
    tiny_model_dir: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling = script("thread_scaling")
    sizes = ["--format", "q4_0", "--rows", "1,8", "--measured", "1,2", "--threads", "4,128", "--rounds", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["thread_scaling.py", "--model", str(tiny_model_dir("llama")), *sizes])
        patch.setattr(scaling, "READ_BYTES", 1 << 20)
        scaling.main()
        assert "PREDICTION, ms" in capsys.readouterr().out
        sys.argv.append("--json")
        scaling.main()
    record = json.loads(capsys.readouterr().out)["results"]
    assert list(record["predicted_seconds"]) == ["4", "128"]
    assert list(record["measured"]["steps"]) == ["1", "2"]
    assert all(seconds > 0 for steps in record["measured"]["steps"].values() for seconds in steps.values())
    assert record["measured"]["barrier"]["2"] > 0


def test_each_second_belongs_to_one_section() -> None:
    profile = script("profile_step")
    timer = profile.SectionTimer()
    now = [0.0]

    def work(*parts: Callable[[], object]) -> None:
        now[0] += 1.0
        for part in parts:
            part()

    inner = timer.wrap("qkv", work)
    outer = timer.wrap("attention", lambda: work(inner, inner))
    whole = timer.wrap("LM head", lambda: work(inner), whole=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile.time, "perf_counter", lambda: now[0])
        timer.wrap("step: rest", lambda: work(outer, whole))()
    measured = timer.take()
    nonzero = {name: seconds for name, seconds in measured.items() if seconds}
    assert nonzero == {"qkv": 2.0, "attention": 1.0, "LM head": 2.0, "step: rest": 1.0}


def test_startup_memory(tiny_model_dir: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    startup = script("startup_memory")
    model, sizes = str(tiny_model_dir("llama")), ["--num-requests", "2", "--input-len", "20", "--output-len", "4"]
    options = ["--skip-tokenizer-init", "--num-threads", "1", "--kv-cache-dtype", "float32"]
    startup.main(["--model", model, "--repeats", "1", "--json", *sizes, "--", *options])
    (start,) = json.loads(capsys.readouterr().out)["results"]
    assert 0 < start["ready"] < start["first_token"]
    assert start["peak_bytes"] >= start["idle_bytes"] > 50 << 20
    assert start["pool_bytes"] == (2 * 2 + 1) * 16 * 2 * 2 * 2 * 16 * 4, "float32, with one more block"


@pytest.fixture(scope="module")
def served(tiny_model_dir: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ServeProcess]]:
    """A tiny model, and a server of it that scripts use instead of one of their own."""
    model = tiny_model_dir("llama", vocab_size=VOCAB_SIZE)
    folder = str(with_byte_tokenizer(model, tmp_path_factory.mktemp("served") / "model"))
    with closing(ServeProcess(Namespace(model=folder, num_threads=1))) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "close", lambda: None)
        yield folder, server


def test_http_cost(
    served: tuple[str, ServeProcess], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    http_cost = script("http_cost")
    folder, server = served
    sizes = ["--streams", "2", "--input-len", "8", "--output-len", "5", "--repeats", "1", "--num-threads", "1"]
    monkeypatch.setattr(http_cost, "ServeProcess", lambda _arguments: server)
    monkeypatch.setattr(http_cost, "VOCABULARY", range(3, 200))
    monkeypatch.setattr(http_cost, "NUM_TTFTS", 2)
    monkeypatch.setattr(sys, "argv", ["http_cost.py", folder, *sizes])
    http_cost.main()
    record = json.loads(capsys.readouterr().out.splitlines()[-1])["http_cost"]
    assert 0 < record["chunks_per_output_token"] <= 1.5
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in record["ttft_seconds"].values())


def test_page_cost(
    served: tuple[str, ServeProcess], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page_cost = script("page_cost")
    folder, server = served
    monkeypatch.setattr(page_cost, "ServeProcess", lambda _arguments: server)
    sizes = ["--streams", "2", "--input-len", "8", "--output-len", "40", "--repeats", "1", "--num-threads", "1"]
    monkeypatch.setattr("benchmarks.http_cost.VOCABULARY", range(3, 200))
    monkeypatch.setattr(sys, "argv", ["page_cost.py", folder, *sizes, "--readers", "0", "2", "--json"])
    page_cost.main()
    record = json.loads(capsys.readouterr().out)
    assert record["machine"]["python"] == platform.python_version()
    none, two = record["results"]
    assert (none["readers"], two["readers"]) == (0, 2)
    assert none["cpu_ratio"] == none["throughput_ratio"] == 1
    assert len(two["output_tokens_per_s"]) == 1
    assert min(two["cpu_us_per_output_token"]) > 0


def test_concurrency(tiny_model_dir: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    concurrency = script("concurrency")
    picture = tmp_path / "figure.svg"
    sizes = [
        "--concurrency",
        "1,3",
        "--contexts",
        "40,256",
        "--batch-sizes",
        "1,2",
        "--steps",
        "3",
        "--num-threads",
        "1",
    ]
    concurrency.main(["--model", str(tiny_model_dir("llama")), "--output", str(picture), "--json", *sizes])
    record = json.loads(capsys.readouterr().out)["results"]
    assert [figures["concurrency"] for figures in record["concurrency"]] == [1, 3]
    assert [figures["num_requests"] for figures in record["concurrency"]] == [4, 6]
    assert record["concurrency"][0]["mean_batch_size"] == 1
    assert 1 < record["concurrency"][1]["mean_batch_size"] <= 3
    assert [(each["context"], each["batch_size"]) for each in record["contexts"]] == [
        (40, 2),
        (40, 1),
        (249, 2),
        (249, 1),
    ], "the longest context leaves room for 3 steps, 2 steps before them, and 2 for later starts"
    assert all(each["num_steps"] == 3 and each["itl_min"] > 0 for each in record["contexts"])
    assert "ITL by context" in picture.read_text()


def test_contexts_of_a_model() -> None:
    concurrency = script("concurrency")
    assert concurrency.parse_contexts(None, 1024) == [128, 256, 512, 1024]
    assert concurrency.parse_contexts("7,300", 300) == [7, 300]
    with pytest.raises(ConfigError, match="contexts must be at most 300 for this model, got 301"):
        concurrency.parse_contexts("301", 300)


def test_structured_cost(tiny_model_dir: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = script("structured_cost")
    folder = with_byte_tokenizer(tiny_model_dir("llama", vocab_size=VOCAB_SIZE), tmp_path / "model")
    arguments = ["--model", str(folder), "--batch-size", "2", "--max-tokens", "12", "--num-threads", "1", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["structured_cost.py", *arguments])
        fill = TokenMasks.fill
        costs.main()
        assert TokenMasks.fill is fill
    record = json.loads(capsys.readouterr().out)["results"]
    assert list(record["rows"]) == list(costs.STRUCTURES)
    for name, row in record["rows"].items():
        assert row["step"] > 0
        assert all((row[column] > 0) == (name != "free") for column in ("compile", "again", "mask", "apply", "share"))


def test_speculation(tiny_model_dir: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=2048)
    model = with_byte_tokenizer(folder, tmp_path / "model")
    arguments = ["--model", str(model), "--workload", "prose", "--concurrency", "1,3", "--num-prompts", "3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["speculation.py", *arguments, "--max-tokens", "12", "--rounds", "2", "--json"])
        script("speculation").main()
    record = json.loads(capsys.readouterr().out)
    assert [result["concurrency"] for result in record["results"]] == [1, 3]
    assert all(len(result["ratios"]) == 2 and result["ratio"] > 0 for result in record["results"])


def test_copying_prompts() -> None:
    prompts = script("copying_prompts").copying_prompts()
    assert len({prompt.message for prompt in prompts}) == len(prompts) == 30
    assert all(prompt.text in prompt.message for prompt in prompts)


@needs_native
def test_speculation_break_even(tiny_model_dir: TinyModel, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_model_dir("llama"))
    arguments = ["--model", model, "--draft-model", model, "--prompt-len", "20", "--output-len", "30"]
    with pytest.MonkeyPatch.context() as patch:
        few = ["--probabilities", "0,1", "--rounds", "1", "--draft-tokens", "2", "--json"]
        patch.setattr(sys, "argv", ["speculation_break_even.py", *arguments, *few])
        script("speculation_break_even").main()
    record = json.loads(capsys.readouterr().out)["results"]
    assert [point["probability"] for point in record["points"]] == [0.0, 1.0]
    assert record["points"][0]["predicted"] < record["points"][1]["predicted"]
