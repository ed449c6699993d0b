"""The sessions of agents have the published quantiles, and run in a closed loop."""

from __future__ import annotations

from collections import Counter
from statistics import median

import pytest

from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.errors import ConfigError
from chairlift.events import EventList, RequestArrived, RequestFinished
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.agent_sessions import ANSWER_TOKEN, AgentSessions
from chairlift.lab.workload.request import WorkloadRequest


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
