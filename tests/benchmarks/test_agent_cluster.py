"""`benchmarks.agent_cluster` runs the sessions of agents on simulated replicas."""

from __future__ import annotations

import json
import sys

import pytest
from benchmarks.agents import Tally
from benchmarks.simulated_cluster import ClusterSimulation

from benchmarks import agent_cluster
from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.agent_sessions import AgentSessions
from chairlift.request import Request


class TokenCost:
    """Equal seconds for each token."""

    def seconds(self, shape: StepShape) -> float:
        return 1e-3 * shape.num_tokens


def test_one_replica_is_the_simulated_engine() -> None:
    workload = AgentSessions(8, 4, 1 / 80, 5, 1000).requests(seed=1, vocab_size=1000)
    config = SimConfig(SchedulerConfig(1024, max_num_seqs=2, max_num_batched_tokens=256), KVPool(150, 16, 1024))
    ends: dict[str, tuple[float, int]] = {}

    def record(request: Request, now: float) -> None:
        ends[request.request_id] = round(now, 6), request.meter.num_cached_tokens

    ClusterSimulation(workload, config, TokenCost(), 1, record).run()
    tally = Tally()
    simulate(workload, config, TokenCost(), tally)
    assert sorted(ends.values()) == sorted((round(each.end, 6), each.num_cached_tokens) for each in tally.finished)
    assert len(ends) == len(workload)


def test_routers_are_compared_over_the_same_sessions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--replicas", "3", "--sessions", "3", "--turns", "4", "--routers", "prefix,random", "--json"]
    monkeypatch.setattr(sys, "argv", ["agent_cluster", *options])
    assert agent_cluster.main() == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert list(results) == ["3, prefix", "3, random"]
    assert results["3, prefix"]["requests"] == results["3, random"]["requests"]
    assert results["3, random"]["hit rate"] < results["3, prefix"]["hit rate"] < 1


def test_sessions_begin_within_the_hours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--replicas=2", "--num-sessions=12", "--hours=3", "--turns=2", "--routers=prefix", "--json"]
    monkeypatch.setattr(sys, "argv", ["agent_cluster", *options])
    assert agent_cluster.main() == 0
    (values,) = json.loads(capsys.readouterr().out)["results"].values()
    assert 12 / 3.5 < values["sessions/h"] < 12 / 2
