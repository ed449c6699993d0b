"""benchmarks/fairness.py on a tiny model: its workload, and the claims that it computes from the requests."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def fairness() -> ModuleType:
    return importlib.import_module("benchmarks.fairness")


def test_a_flood_has_twenty_times_as_many_requests_of_one_key(fairness: ModuleType) -> None:
    workload = fairness.TwoKeyWorkload(rate=5.0, seconds=60.0, input_len=8, output_len=4)
    light, flood = workload.arrivals("light", 1), workload.arrivals("heavy", 20)
    assert light == workload.arrivals("light", 1) == sorted(light)
    assert 15 < len(flood) / len(light) < 27
    assert max(flood) < 60


def test_runs_are_measured_on_a_server_and_drawn(
    fairness: ModuleType, tiny_model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = fairness.TwoKeyWorkload(rate=6.0, seconds=0.8, input_len=8, output_len=4)
    monkeypatch.setattr(fairness, "VOCABULARY", 90)
    monkeypatch.setattr(fairness, "POLICIES", ("fair",))
    runs = fairness.run_policies(
        workload, [str(tiny_model_dir("llama")), "--skip-tokenizer-init", "--max-model-len", "64"]
    )
    assert [(run.policy, run.times_as_much) for run in runs] == [("fair", 1), ("fair", 20)]
    for run in runs:
        assert run.num_sent["light"] == len(run.calls["light"]) == len(workload.arrivals("light", 1))
        assert run.num_sent["heavy"] == len(workload.arrivals("heavy", run.times_as_much))
    runs += [replace(run, policy="fcfs") for run in runs]
    flooded = fairness.find_run(runs, "fair", 20).ttft("light", 50)
    assert fairness.claims(runs) == {
        "fair_flood_over_equal": flooded / fairness.find_run(runs, "fair", 1).ttft("light", 50),
        "fair_flood_over_fcfs_flood": 1.0,
    }
    fairness.draw(runs, workload, tmp_path / "fairness.png")
    assert (tmp_path / "fairness.png").stat().st_size > 10_000
