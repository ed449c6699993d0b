"""benchmarks/policy_figures.py: the numbers in docs/policies are those of the policies."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from chairlift.config import EngineConfig
from chairlift.core.factory import KVPool
from chairlift.engine.startup.loaded_model import load_model
from chairlift.events import EventList
from chairlift.lab.report.recorded_run import RecordedRun, recorded_run
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.simulator import SimConfig, simulate

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
