"""What observers do for an event does not grow with the number of sequences in the engine. Operations are counted."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from chairlift.clock import VirtualClock
from chairlift.engine.event_hub import EventHub
from chairlift.engine.process.client import EngineStatus
from chairlift.events import Event, RequestArrived
from chairlift.server.telemetry.engine_observer import EngineObserver, engine_metrics
from chairlift.server.telemetry.live_feed import LiveFeed
from support.fakes import make_engine, make_request
from support.operations import count_operations
from support.tracked_engine import started

SIZES = (100, 4_000)
ANSWERS = 100
STEPS = 300
MAX_GROWTH = 2.0


@cache
def engine_events(policy: str, num_sequences: int) -> tuple[list[Event], list[Event]]:
    """The events of an engine with calls of ANSWERS siblings of two tenants: of their arrival, and of STEPS steps."""
    core, manager, _, log = make_engine(num_blocks=256, max_num_seqs=16, scheduling_policy=policy)
    for number in range(num_sequences):
        call, answer = divmod(number, ANSWERS)
        leader_id = f"call-{call}~{call}"
        request_id = f"{leader_id}.{answer}" if answer else leader_id
        request = make_request(request_id, [call % 50, 5, 6, 7, 8], 2 + number % 3)
        request.leader_id = leader_id if answer else None
        request.tenant = "one" if call % 2 else "two"
        core.add(request)
    log.events.insert(0, started(manager, scheduling_policy=policy, max_num_seqs=16))
    arrivals, log.events = log.events, []
    for _ in range(STEPS):
        core.step()
    return arrivals, log.events


def observers() -> EventHub:
    hub = EventHub()
    observer = EngineObserver(hub, VirtualClock())
    engine_metrics(hub, lambda: EngineStatus("running", 0, 0.0, 0), observer.tracker, "model")
    hub.add(LiveFeed(observer.tracker))
    return hub


def operations_per_event(hub: EventHub, events: list[Event]) -> float:
    return count_operations(lambda: hub.publish(events)) / len(events)


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_the_cost_of_an_event_does_not_grow_with_the_number_of_sequences(policy: str, monkeypatch: Any) -> None:
    # Each kind of work that is done once in a while is done several times.
    monkeypatch.setattr("chairlift.server.telemetry.live_feed.MAX_PART_BYTES", 1 << 14)
    costs: dict[str, list[float]] = {"arrivals": [], "steps": []}
    for size in SIZES:
        hub, (arrivals, steps) = observers(), engine_events(policy, size)
        costs["arrivals"].append(operations_per_event(hub, arrivals))
        costs["steps"].append(operations_per_event(hub, steps))
    for kind, (smallest, *larger) in costs.items():
        assert max(larger) <= MAX_GROWTH * smallest, (kind, costs)


def test_a_sequence_is_found_by_the_ids_of_its_call_and_prompt_until_too_many_have_followed(monkeypatch: Any) -> None:
    monkeypatch.setattr("chairlift.server.telemetry.engine_observer.MAX_SEQUENCES", 6)
    hub = EventHub()
    observer = EngineObserver(hub)

    def arrive(*request_ids: str) -> None:
        hub.publish(RequestArrived(0.0, request_id, 1, 1) for request_id in request_ids)

    arrive("first~1", "first~1.1", "first~1.1")
    assert [found.request.request_id for found in observer.find("first")] == ["first~1", "first~1.1"]
    arrive("second.0~2", "second.1~3")
    assert len(observer.find("second")) == 2
    assert len(observer.find("second.1")) == 1
    assert len(observer.find("first")) == 2
    arrive("third~4")
    assert not observer.find("first"), "the oldest call is forgotten"
    assert len(observer.find("second")) == 2
