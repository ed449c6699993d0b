"""`benchmarks.agent_servers` sends the turns of a session one after the other."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from benchmarks.agent_servers import Answer, answer_sessions, under_way, values_of

from chairlift.lab.workload.agent_sessions import AgentSessions
from chairlift.lab.workload.request import WorkloadRequest
from support.waiting import AMPLE_SECONDS


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
