"""`benchmarks.agent_servers` sends the turns of a session one after the other."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from benchmarks.agent_servers import Answer, answer_sessions, prompt_lens, values_of

from chairlift.lab.workload.agent_sessions import AgentSessions
from chairlift.lab.workload.request import WorkloadRequest


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
    workload = AgentSessions(4, 2, scale=0.002, turns=3).requests(0, 100)
    echo = Echo()
    answers = asyncio.run(answer_sessions(echo, [_soon(item) for item in workload]))
    assert answers.keys() == echo.prompts.keys() == {item.request_id for item in workload}
    assert {name: len(prompt) for name, prompt in echo.prompts.items()} == prompt_lens(workload)
    for item in workload:
        if item.continues is not None:
            before = [*echo.prompts[item.continues], *answers[item.continues].token_ids]
            assert echo.prompts[item.request_id][: len(before)] == before
        if item.follows is not None:
            assert answers[item.follows].end <= answers[item.request_id].due


def test_values_of_a_run() -> None:
    answers = {"a": Answer(10.0, [1], 11.0, 12.0, 30), "b": Answer(20.0, [1], 23.0, 28.0, 60)}
    values = values_of(answers, {"a": 80, "b": 100}, 2)
    assert values == pytest.approx({"sessions/h": 400.0, "TTFT P50, s": 2.0, "TTFT P95, s": 2.9, "hit rate": 0.5})
    answers["b"].num_cached_tokens = None
    assert "hit rate" not in values_of(answers, {"a": 80, "b": 100}, 2)


def _soon(item: WorkloadRequest) -> WorkloadRequest:
    return replace(item, arrival=item.arrival / 1000)
