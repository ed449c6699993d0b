"""The sessions of agents, and the turns of recorded sessions, which are replayed with the recorded gaps."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.errors import ConfigError
from chairlift.events import EventList, RequestArrived, RequestFinished
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.agent_sessions import ANSWER_TOKEN, AgentSessions
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.traces import TraceOptions, read_trace
from support.recorded_trace import record_trace


class TokenCost:
    """Equal seconds for each token."""

    def seconds(self, shape: StepShape) -> float:
        return 1e-3 * shape.num_tokens


def prompt_lens(requests: list[WorkloadRequest]) -> tuple[list[int], int]:
    """The complete prompt lengths, and the number of their tokens that the turn before has."""
    ends: dict[str | None, int] = {None: 0}
    lens = []
    for item in requests:
        lens.append(ends[item.continues] + len(item.prompt_token_ids))
        ends[item.request_id] = lens[-1] + item.output_len
    return lens, sum(ends[item.continues] for item in requests)


def test_the_quantiles_are_those_that_were_published() -> None:
    requests = AgentSessions(100, 8, scale=0.1, max_model_len=40_000).requests(seed=1, vocab_size=1000)
    lens, num_known = prompt_lens(requests)
    gaps = [item.arrival for item in requests if item.continues is not None]
    turns = Counter(item.request_id.split("-")[0] for item in requests)
    assert median(lens) == pytest.approx(14_200, rel=0.15)
    assert median(item.output_len for item in requests) == pytest.approx(44.4, rel=0.1)
    assert median(count for name, count in turns.items() if "sub" not in name) == pytest.approx(43, rel=0.15)
    assert num_known / sum(lens) > 0.955
    assert sum("sub" in name for name in turns) == pytest.approx(44, abs=12)
    assert sum(gap <= 1 for gap in gaps) / len(gaps) == pytest.approx(0.86, abs=0.02)
    assert sum(gap <= 10 for gap in gaps) / len(gaps) == pytest.approx(0.95, abs=0.02)


def test_equal_seeds_give_equal_sessions_within_the_limit() -> None:
    load = AgentSessions(12, 4, scale=1 / 80, turns=20, max_model_len=2000)
    requests = load.requests(seed=3, vocab_size=100)
    assert requests == load.requests(seed=3, vocab_size=100) != load.requests(seed=4, vocab_size=100)
    lens, _ = prompt_lens(requests)
    assert max(length + item.output_len for length, item in zip(lens, requests, strict=True)) <= 2000
    system = requests[0].prompt_token_ids[:200]
    first_turns = [item for item in requests if item.continues is None and ".sub" not in item.request_id]
    assert len(first_turns) == 12
    assert all(item.prompt_token_ids[:200] == system for item in first_turns)


def test_no_more_sessions_run_at_a_time_and_sub_agents_interrupt_their_session() -> None:
    load = AgentSessions(9, 3, scale=1 / 80, turns=8, max_model_len=2000)
    requests = load.requests(seed=0, vocab_size=100)
    config = SimConfig(SchedulerConfig(max_model_len=2048), KVPool(600, 16, 2048))
    log = EventList()
    simulate(requests, config, TokenCost(), log)
    finished = {each.request_id: each for each in log.events if isinstance(each, RequestFinished)}
    assert finished.keys() == {item.request_id for item in requests}
    assert any("sub" in name for name in finished)
    for item in requests:
        if item.follows is not None:
            gap = finished[item.request_id].arrival_time - finished[item.follows].time
            assert gap == pytest.approx(item.arrival)
            assert finished[item.request_id].num_cached_tokens or item.continues is None
    running = most = 0
    for event in log.events:
        running += isinstance(event, RequestArrived) - isinstance(event, RequestFinished)
        most = max(most, running)
    assert most == 3


def test_answers_end_sessions_and_come_before_long_gaps() -> None:
    requests = AgentSessions(30, 4, scale=0.01).requests(seed=2, vocab_size=100)
    by_id = {item.request_id: item for item in requests}
    continued = {item.continues for item in requests}
    for item in requests:
        before = by_id.get(item.continues or "")
        if before is not None and item.follows == item.continues:
            assert (item.arrival > 10) is (before.output_token == ANSWER_TOKEN)
        if item.request_id not in continued:
            assert item.output_token == ANSWER_TOKEN


def test_wrong_values_are_rejected() -> None:
    with pytest.raises(ConfigError, match="concurrency must be at least 1, got 0"):
        AgentSessions(1, 0)
    with pytest.raises(ConfigError, match=r"scale=1 must be above 0 and below 0.25, .* max_model_len=8000"):
        AgentSessions(1, 1, max_model_len=8000)


CONFIG = SimConfig(SchedulerConfig(1024, max_num_seqs=4, max_num_batched_tokens=256), KVPool(300, 16, 1024))
CLOSED = TraceOptions(closed_loop=True)


class StepSeconds:
    """Equal seconds for each step."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self, shape: StepShape) -> float:
        return self._seconds


def finished(requests: list[WorkloadRequest], seconds: float) -> dict[str, RequestFinished]:
    log = EventList()
    simulate(requests, CONFIG, StepSeconds(seconds), log)
    return {each.request_id: each for each in log.events if isinstance(each, RequestFinished)}


def line(arrival: float, *hashes: str, prompt_len: int = 0, latency: float = 1.0, **more: Any) -> str:
    record = {"arrival": arrival, "prompt_len": prompt_len or 16 * len(hashes), "prompt_hashes": hashes}
    return json.dumps(record | {"output_len": 4, "e2e_latency": latency} | more)


def read(path: Path, *lines: str) -> dict[str, tuple[float, str | None]]:
    path.write_text("\n".join(lines) + "\n")
    return {item.request_id: (item.arrival, item.follows) for item in read_trace(path, CLOSED)}


def test_recorded_turns_follow_those_of_their_session(tmp_path: Path) -> None:
    """Each session has a system prompt of its own, so that its turns are the only ones with a common beginning."""
    sessions = [AgentSessions(1, 1, 1 / 200, 6, 1000).requests(seed, 1000) for seed in range(5)]
    workload = [
        WorkloadRequest(
            f"{number}.{item.request_id}",
            item.arrival,
            item.prompt_token_ids,
            item.output_len,
            follows=item.continues and f"{number}.{item.continues}",
            continues=item.continues and f"{number}.{item.continues}",
        )
        for number, session in enumerate(sessions)
        for item in session
        if ".sub" not in item.request_id
    ]
    order = record_trace(tmp_path / "trace.jsonl", workload, CONFIG, StepSeconds(0.1))
    name_of = {f"chairlift-{index}": request_id for index, request_id in enumerate(order)}
    replayed = read_trace(tmp_path / "trace.jsonl", CLOSED)
    follows = {name_of[item.request_id]: item.follows and name_of[item.follows] for item in replayed}
    assert follows == {item.request_id: item.follows for item in workload}
    before, slower = finished(replayed, 0.1), finished(replayed, 0.3)
    gaps = {item.request_id: item.arrival for item in replayed if item.follows is not None}
    assert len(gaps) > 15
    for name, gap in gaps.items():
        source = next(item.follows for item in replayed if item.request_id == name)
        for run in (before, slower):
            assert run[name].arrival_time - run[source or ""].time == pytest.approx(gap)
        assert slower[name].arrival_time > before[name].arrival_time
    open_loop = finished(read_trace(tmp_path / "trace.jsonl"), 0.3)
    assert max(each.arrival_time for each in open_loop.values()) < max(each.arrival_time for each in slower.values())


def test_a_turn_follows_the_longest_prompt_that_had_ended(tmp_path: Path) -> None:
    turns = read(
        tmp_path / "t.jsonl",
        line(9.0, "a", "b", "c", request_id="third"),
        line(0.0, "a", request_id="first"),
        line(2.0, "a", "b", request_id="second", latency=4.0),
        line(5.0, "a", "b", "c", request_id="early"),
        line(7.5, "a", "b", request_id="equal"),
        line(8.0, "x", "y", request_id="other"),
    )
    assert turns == {
        "first": (0.0, None),
        "second": (1.0, "first"),
        "early": (4.0, "first"),
        "equal": (6.5, "first"),
        "other": (8.0, None),
        "third": (0.5, "equal"),
    }


def test_the_first_requests_are_those_that_arrived_first(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([line(5.0, "a", "b"), line(7.0, "c"), line(1.0, "a")]) + "\n")
    found = read_trace(path, TraceOptions(limit=2, closed_loop=True))
    assert [(item.arrival, item.follows) for item in found] == [(0.0, None), (3.0, found[0].request_id)]


def test_tenants_have_separate_sessions(tmp_path: Path) -> None:
    lines = [line(float(at), *"abc"[: at + 1], tenant=tenant, latency=0.5) for at, tenant in enumerate("xyx")]
    found = list(read(tmp_path / "t.jsonl", *lines).values())
    assert found == [(0.0, None), (1.0, None), (1.5, "chairlift-0")]


def test_traces_without_ends_or_hashes_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival": 0, "prompt_len": 4, "output_len": 2}\n')
    with pytest.raises(ConfigError, match="line 1: closed_loop requires e2e_latency"):
        read_trace(path, CLOSED)
    path.write_text('{"timestamp": 0, "input_length": 4, "output_length": 2, "hash_ids": []}\n')
    with pytest.raises(ConfigError, match=r"closed_loop requires hashes and latencies, .* in the format mooncake"):
        read_trace(path, CLOSED)
