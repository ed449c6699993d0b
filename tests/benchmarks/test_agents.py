"""The benchmarks of agents: policies of eviction, replicas, servers, and the lifetime of prefixes."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import replace

import pytest
from benchmarks.agent_servers import Answer, answer_sessions, under_way, values_of
from benchmarks.agents import Tally
from benchmarks.simulated_cluster import ClusterSimulation

from benchmarks import agent_cluster, agents, cache_lifetime
from chairlift.config import EVICTION_POLICIES, SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.agent_sessions import AgentSessions
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.request import Request
from support.waiting import AMPLE_SECONDS


def test_policies_are_compared_over_the_same_sessions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = agents.workloads
    monkeypatch.setattr(agents, "workloads", lambda args: dict(list(whole(args).items())[:1]))
    monkeypatch.setattr(sys, "argv", ["agents", "--sessions", "3", "--turns", "4", "--seeds", "0", "--json"])
    assert agents.main() == 0
    (line,) = capsys.readouterr().out.splitlines()
    (load,) = json.loads(line)["results"].values()
    assert load.keys() == {*EVICTION_POLICIES, "oracle"}
    for values in load.values():
        assert 0 < values["hit rate"] < 1
        assert 0 < values["TTFT P50, s"] <= values["TTFT P95, s"]


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


class Echo:
    """A system that answers at once, with the last tokens of the prompt."""

    def __init__(self) -> None:
        self.prompts: dict[str, list[int]] = {}

    async def complete(self, item: WorkloadRequest, answer: Answer) -> None:
        self.prompts[item.request_id] = list(item.prompt_token_ids)
        await asyncio.sleep(0)
        answer.first_token_time = time.perf_counter()
        answer.token_ids = [7] * item.output_len


def test_a_turn_continues_the_answer_before_it() -> None:
    workload = under_way(AgentSessions(8, 4, scale=0.002, turns=6).requests(0, 100), 4, seed=0)
    echo = Echo()
    answers = asyncio.run(answer_sessions(echo, [_soon(item) for item in workload], AMPLE_SECONDS))
    assert answers.keys() == echo.prompts.keys() == {item.request_id for item in workload}
    assert all(answers[name].num_prompt_tokens == len(prompt) for name, prompt in echo.prompts.items())
    for item in workload:
        if item.continues is not None:
            before = [*echo.prompts[item.continues], *answers[item.continues].token_ids]
            assert echo.prompts[item.request_id][: len(before)] == before
        if item.follows is not None:
            assert answers[item.follows].end <= answers[item.request_id].due


def test_sessions_under_way_begin_with_all_of_their_earlier_turns() -> None:
    workload = AgentSessions(8, 4, scale=0.002, turns=6).requests(0, 100)
    echo, late = Echo(), Echo()
    begun = [_soon(item) for item in under_way(workload, 4, seed=0)]
    asyncio.run(answer_sessions(late, begun, AMPLE_SECONDS))
    asyncio.run(answer_sessions(echo, [_soon(item) for item in workload], AMPLE_SECONDS))
    assert len(late.prompts) < len(echo.prompts)
    assert {name: len(prompt) for name, prompt in echo.prompts.items() if name in late.prompts} == {
        name: len(prompt) for name, prompt in late.prompts.items()
    }
    assert sum(item.follows is None for item in begun) == 4


def test_a_run_ends_when_its_time_is_over() -> None:
    workload = [WorkloadRequest("early", 0.0, [1], 2), WorkloadRequest("late", AMPLE_SECONDS, [1], 2)]
    assert asyncio.run(answer_sessions(Echo(), workload, 0.01)).keys() == {"early"}


def test_values_leave_out_what_ended_during_the_warm_up() -> None:
    answers = [Answer(10.0, 50, [1], 10.5, 14.0, 0), Answer(11.0, 80, [1], 12.0, 15.0, 30)]
    answers.append(Answer(20.0, 100, [1], 23.0, 35.0, 60))
    expected = {"turns/h": 360.0, "TTFT P50, s": 2.0, "TTFT P95, s": 2.9, "failed calls": 0, "hit rate": 0.5}
    assert values_of(answers, 25.0, 5.0) == pytest.approx(expected)
    answers.append(Answer(12.0, 100))
    assert values_of(answers, 25.0, 5.0) == pytest.approx(expected)
    answers[2].num_cached_tokens = None
    assert "hit rate" not in values_of(answers, 25.0, 5.0)


def _soon(item: WorkloadRequest) -> WorkloadRequest:
    return replace(item, arrival=item.arrival / 1000)


SPEEDS = argparse.Namespace(prefill=0.0, decode=cache_lifetime.SCALE)


def test_a_prefix_is_found_until_its_time_is_over() -> None:
    """Outputs take a second for each token; the system prompt has 160 tokens at this scale."""
    first = WorkloadRequest("a", 0.0, [1] * 200, 10)
    second = WorkloadRequest("b", 30.0, [1] * 40, 10, follows="a", continues="a")
    third = WorkloadRequest("c", 90.0, [1] * 50, 10, follows="b", continues="b")
    workload = [first, second, third]
    short, long = (cache_lifetime.measure(workload, ttl, SPEEDS) for ttl in (60.0, 3600.0))
    scale, prompts = cache_lifetime.SCALE, 200 + 250 + 310
    assert long["prefill tokens"] == pytest.approx((200 - 160 + 40 + 50) / scale)
    assert short["prefill tokens"] == pytest.approx((200 - 160 + 40 + 310 - 160) / scale)
    assert short["hit rate"] == pytest.approx(1 - (200 - 160 + 40 + 310 - 160) / prompts)
    computed = 10 * prompts
    assert short["tokens held"] == pytest.approx((computed + 30 * 210 + 60 * 260 + 60 * 320) / 150 / scale)
    assert long["tokens held"] == pytest.approx((computed + 30 * 210 + 90 * 260 + 3600 * 320) / 150 / scale)


def test_the_table_has_each_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["cache_lifetime", "--sessions", "20", "--json"])
    assert cache_lifetime.main() == 0
    results = json.loads(capsys.readouterr().out)["results"]
    rates = [values["hit rate"] for values in results.values()]
    assert list(results) == list(cache_lifetime.TTLS)
    assert 0.5 < rates[0] <= rates[1] <= rates[2] <= rates[3] < 1
    assert results["1 minute"]["tokens held"] < results["1 hour"]["tokens held"]
