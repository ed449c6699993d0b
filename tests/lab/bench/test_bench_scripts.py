"""The scripts in benchmarks/ on a tiny random model, and the figures of docs/policies."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.http_cost import ServeProcess

from chairlift.config import EngineConfig
from chairlift.core.factory import KVPool
from chairlift.engine.startup.loaded_model import load_model
from chairlift.errors import ConfigError
from chairlift.events import EventList
from chairlift.lab.report.recorded_run import RecordedRun, recorded_run
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.simulator import SimConfig, simulate
from support.byte_tokenizer import VOCAB_SIZE, with_byte_tokenizer

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


def test_copying_prompts() -> None:
    prompts = script("copying_prompts").copying_prompts()
    assert len({prompt.message for prompt in prompts}) == len(prompts) == 30
    assert all(prompt.text in prompt.message for prompt in prompts)


ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs" / "policies"


class NoTime:
    """A cost model whose steps take no time, as under the clock of the benchmark."""

    def seconds(self, shape: StepShape) -> float:
        return 0.0


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return importlib.import_module("benchmarks.policy_figures")


@pytest.fixture(scope="module")
def runs(figures: ModuleType) -> dict[str, RecordedRun]:
    """Every run of the benchmark, in the simulator: its decisions are the engine's (tests/lab/sim/test_fidelity.py)."""
    return {label: simulated(figures, label) for label in figures.POLICIES}


def simulated(figures: ModuleType, label: str) -> RecordedRun:
    config = EngineConfig(**figures.LIMITS, **(figures.POLICIES | figures.ORDERS)[label])
    assert config.max_model_len is not None
    assert config.num_kv_blocks is not None
    pool = KVPool(config.num_kv_blocks, config.block_size, config.max_model_len, config.kv, config.kv_arena)
    sim = SimConfig(config.scheduler_config(config.max_model_len), pool)
    log = EventList()
    requests = figures.order_requests(label, 256) if label in figures.ORDERS else figures.make_requests(256)
    simulate(requests, sim, NoTime(), log)
    return recorded_run(log.events, label)


def test_the_page_has_the_numbers_of_these_runs(figures: ModuleType, runs: dict[str, RecordedRun]) -> None:
    page = (PAGES / "README.md").read_text(encoding="utf-8")
    for table in figures.markdown_tables([figures.policy_numbers(run) for run in runs.values()]):
        assert table in page


@pytest.mark.parametrize("label", ["continuous/paged", "static(4)/paged"])
def test_an_engine_has_the_numbers_of_the_simulator(
    figures: ModuleType, runs: dict[str, RecordedRun], label: str, tiny_model_dir: Callable[..., Path]
) -> None:
    model = str(tiny_model_dir("llama", max_position_embeddings=256))
    run, tokens = figures.run_policy(label, load_model(EngineConfig(model, skip_tokenizer_init=True, num_threads=1)))
    assert figures.policy_numbers(run) == figures.policy_numbers(runs[label])
    assert {name: len(output) for name, output in tokens.items()} == {
        request.request_id: request.output_len for request in figures.make_requests(256)
    }


def test_every_figure_is_drawn_and_shown_on_a_page(
    figures: ModuleType, runs: dict[str, RecordedRun], tmp_path: Path
) -> None:
    shown = {
        name
        for page in PAGES.glob("*.md")
        for name in re.findall(r"images/policies/(.+?)\.png", page.read_text("utf-8"))
    }
    assert shown == {figure.name for figure in figures.FIGURES}
    orders = {label: simulated(figures, label) for label in ("fcfs", "srpt")}
    (srpt,) = (figure for figure in figures.FIGURES if figure.name == "order-srpt")
    for figure in (*figures.FIGURES[:2], srpt):
        path = figures.draw_figure(figure, runs | orders, tmp_path)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 150_000
