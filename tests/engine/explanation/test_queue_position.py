"""The order of the queue that explanations compute: how often, of what, and when it is computed again."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from chairlift.engine.explanation import queue_position
from chairlift.engine.explanation.explain import Explainer, Viewer
from chairlift.engine.explanation.queue_position import restored_request
from chairlift.server.api import requests
from support.explained import explain
from support.tracked_engine import TrackedEngine


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The queues that explanations construct."""
    made: list[Any] = []

    def make_queue(*arguments: Any) -> Any:
        made.append(original(*arguments))
        return made[-1]

    original = queue_position.make_queue
    monkeypatch.setattr(queue_position, "make_queue", make_queue)
    return made


def waiting_engine(policy: str = "priority") -> TrackedEngine:
    """20 requests wait behind a running one."""
    engine = TrackedEngine(max_num_seqs=1, scheduling_policy=policy, length_predictor="max_tokens")
    engine.add([1, 2], 40)
    engine.steps(1)
    for index in range(20):
        engine.add([index] * 3, 4, tenant="ab"[index % 2], priority=-index % 7)
    engine.steps(2)
    return engine


def test_the_sequences_of_a_call_share_the_order_of_the_queue(queues: list[Any]) -> None:
    engine = waiting_engine()
    observer = SimpleNamespace(
        explainer=Explainer(engine.tracker), viewer=lambda key: Viewer(), now=engine.clock.now, replica_id=None
    )
    found: list[Any] = [SimpleNamespace(observer=observer, request=each) for each in engine.tracker.waiting()[:16]]
    explained = asyncio.run(requests._explain(found, None))  # type: ignore[arg-type]
    assert len(queues) <= 2, "the order when they had to wait, and the order now"
    alone = [explain(engine, each.request.request_id) for each in found]
    assert [each.position for each in explained] == [each.position for each in alone]
    assert len(queues) > 16
    assert [each.would_admit for each in explained] == [each.would_admit for each in alone]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "srpt", "mlfq", "dlpm", "edf"])
def test_an_explainer_follows_the_changes_of_the_queue(policy: str) -> None:
    engine = waiting_engine(policy)
    explainer = Explainer(engine.tracker)
    for change in range(6):
        if change == 1:
            engine.add([5], 2, tenant="b", priority=-5)
        elif change == 2:
            engine.core.abort(engine.tracker.waiting()[0].request_id)
        engine.steps(change % 3 * 10)
        for request in engine.tracker.waiting():
            position = explainer.explain(request, Viewer(), engine.clock.now(), []).position
            assert position == explain(engine, request.request_id).position


def test_the_tokens_of_a_restored_request_take_no_memory() -> None:
    engine = TrackedEngine(max_num_seqs=1, num_blocks=2000, max_model_len=5000)
    engine.add([1], 9)
    engine.steps(1)
    short, long = (engine.add([2] * length, 3) for length in (2, 4000))
    engine.steps(1)
    restored = [restored_request(each) for each in engine.tracker.waiting()]
    assert [each.request_id for each in restored] == [short, long]
    assert sys.getsizeof(restored[0].token_ids) == sys.getsizeof(restored[1].token_ids)
    for request, length in zip(restored, (2, 4000), strict=True):
        assert len(request.token_ids) == request.num_tokens == request.num_prompt_tokens == length
        assert request.max_total_tokens == request.end_total_tokens == length + 3
        assert (request.num_output_tokens, request.num_pending_tokens) == (0, 0)
