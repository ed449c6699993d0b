"""Tests the frames and the history of events that live pages read, and the cost of observers."""

from __future__ import annotations

import dataclasses
import json
import threading
import zlib
from functools import cache
from typing import Any

import pytest

from chairlift.clock import VirtualClock
from chairlift.engine.event_hub import EventHub
from chairlift.engine.explanation.explain import Viewer
from chairlift.engine.process.client import EngineStatus
from chairlift.events import Event, PrefixMatched, RequestArrived, RequestRejected, Step, from_json
from chairlift.observability.event_log import encode_event
from chairlift.server.telemetry import live_feed
from chairlift.server.telemetry.engine_observer import EngineObserver, engine_metrics
from chairlift.server.telemetry.live_feed import LiveFeed
from chairlift.server.telemetry.redaction import Redactor
from support.fakes import make_engine, make_request
from support.operations import count_operations
from support.tracked_engine import TrackedEngine, started

ADMIN = Viewer()
TENANT = Viewer("alpha", is_admin=False)


def feed_of(engine: TrackedEngine) -> LiveFeed:
    """A feed that receives the later events of the engine, each after the tracker."""
    feed = LiveFeed(engine.tracker)
    events = engine.log.events
    append = events.append

    class FedEvents(list[Event]):
        def append(self, event: Event) -> None:
            append(event)
            super().append(event)
            feed.emit(event)

    engine.log.events = FedEvents()
    return feed


def crowd(engine: TrackedEngine) -> None:
    for number in range(6):
        engine.add([number, 5, 6], 9, tenant="alpha" if number % 2 else "beta-secret")
        engine.steps(1)


def decode(parts: list[bytes]) -> list[dict[str, Any]]:
    return json.loads(b"[" + b",".join(parts) + b"]")


def test_the_json_of_an_event_is_that_of_the_event_log() -> None:
    engine = TrackedEngine(num_blocks=8, max_num_seqs=3, scheduling_policy="fair")
    events = engine.log.events
    crowd(engine)
    engine.to_end()
    assert len(events) > 20
    for event in events:
        assert from_json(encode_event(event)) == event


def test_the_history_has_every_event_once_and_each_part_begins_with_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "MAX_PART_BYTES", 3000)
    compress, threads = zlib.compress, set[threading.Thread]()

    def recorded_compress(data: bytes, level: int) -> bytes:
        threads.add(threading.current_thread())
        return compress(data, level)

    monkeypatch.setattr(live_feed.zlib, "compress", recorded_compress)
    engine = TrackedEngine(num_blocks=8, max_num_seqs=3)
    feed = feed_of(engine)
    first = engine.add([1, 2, 3], 4)
    crowd(engine)
    engine.to_end()
    parts = [decode([part]) for part in feed.history()]
    assert len(parts) > 3
    assert len(threads - {threading.current_thread()}) == len(threads) == 1, "events arrive on the event loop"
    for part in parts:
        assert [event["type"] for event in part[:2]] == ["engine_started", "snapshot"]
    # The first part begins with the state after the first event, which is in its snapshot.
    assert [request["arrived"]["request_id"] for request in parts[0][1]["requests"]] == [first]
    recorded = [event for part in parts for event in part[2:]]
    assert recorded == [json.loads(encode_event(event)) for event in engine.log.events][1:]
    steps = [event["step"] for event in recorded if event["type"] == "step"]
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert len({event["request_id"] for event in recorded if event["type"] == "request_finished"}) == 7


def test_old_parts_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "PART_SECONDS", 0.5)
    monkeypatch.setattr(live_feed, "HISTORY_SECONDS", 2.0)
    engine = TrackedEngine(max_num_seqs=3)
    feed = feed_of(engine)
    for _ in range(8):
        crowd(engine)
        engine.to_end()
    times = [event["time"] for part in feed.history() for event in decode([part])[1:]]
    assert engine.clock.now() > 4
    assert engine.clock.now() - 3 < min(times)


def test_a_snapshot_has_the_progress_and_the_blocks_of_unfinished_requests() -> None:
    engine = TrackedEngine(max_num_seqs=2, block_size=2)
    feed = feed_of(engine)
    crowd(engine)
    started, snapshot = decode(feed.opening(engine.clock.now()))
    assert started["type"] == "engine_started"
    assert [request["state"] for request in snapshot["requests"]] == ["running"] * 2 + ["waiting"] * 4
    for shown in snapshot["requests"][:2]:
        request = engine.core.scheduler.unfinished[shown["arrived"]["request_id"]]
        assert shown["block_ids"] == engine.manager.block_tables(request)[0]
        assert shown["num_output_tokens"] == request.num_output_tokens > 0
        assert shown["first_token_time"] > shown["first_scheduled_time"]
    assert snapshot["requests"][2]["waiting"]["reason"] == "seats"


@pytest.mark.parametrize(("num_readers", "mebibytes"), [(0, 1), (1, 16), (2, 16)])
def test_at_most_16_mebibytes_of_events_are_kept_for_readers(num_readers: int, mebibytes: int) -> None:
    feed = LiveFeed(TrackedEngine().tracker)
    feed.num_readers = num_readers
    for number in range(40):
        feed.emit(RequestRejected(0.0, f"r{number}", "x" * 500_000))
    kept = sum(len(entry.encoded) for entry in feed._recent)
    assert (mebibytes << 20) - 600_000 < kept <= mebibytes << 20


def test_a_frame_has_at_most_a_mebibyte_of_events() -> None:
    engine = TrackedEngine()
    feed = LiveFeed(engine.tracker)
    feed.num_readers = 1
    for number in range(3):
        feed.emit(RequestRejected(0.0, f"r{number}", "x" * 400_000))
    assert feed.events_since(0, Redactor(ADMIN, engine.tracker)) is None
    assert len(feed.events_since(1, Redactor(ADMIN, engine.tracker)) or []) == 2


def test_events_that_a_slow_reader_lost_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "MAX_RECENT_BYTES", 1000)
    engine = TrackedEngine()
    feed = feed_of(engine)
    redactor = Redactor(ADMIN, engine.tracker)
    index = feed.next_index
    engine.add([1], 2)
    assert [event["type"] for event in decode(feed.events_since(index, redactor) or [])] == ["request_arrived"]
    engine.to_end()
    crowd(engine)
    assert feed.events_since(index, redactor) is None
    assert feed.events_since(feed.next_index, redactor) == []


def test_a_key_sees_the_requests_of_other_keys_by_opaque_ids_only() -> None:
    engine = TrackedEngine(num_blocks=6, max_num_seqs=3, scheduling_policy="fair")
    feed = feed_of(engine)
    redactor = Redactor(TENANT, engine.tracker)
    crowd(engine)
    hidden = {r.request_id for r in engine.tracker.requests() if r.tenant != "alpha"}
    assert len(hidden) == 3
    engine.to_end()
    shown = decode([*feed.opening(engine.clock.now(), redactor), *(feed.events_since(0, redactor) or [])])
    strings = set(_strings(shown))
    assert not strings & hidden
    assert "beta-secret" not in strings
    assert strings >= {"r2", "r4", "r6", "alpha"}
    arrived = [event["request_id"] for event in shown if event["type"] == "request_arrived"]
    finished = [event["request_id"] for event in shown if event["type"] == "request_finished"]
    assert sorted(arrived) == sorted(finished)  # The opaque id of a request is the same in all events.
    assert sum(request_id.startswith("other-") for request_id in arrived) == 3


def test_a_key_sees_the_misses_of_its_own_prompts_without_the_requests_of_others() -> None:
    engine = TrackedEngine(num_blocks=16, max_num_seqs=1)
    prompt = list(range(40))
    names = [
        engine.add(tokens, 2, tenant=tenant, cache_salt=tenant)
        for tokens, tenant in ((prompt, "alpha"), ([*range(50, 90)], "beta-secret"), (prompt, "alpha"))
    ]
    engine.to_end()
    redactor = Redactor(TENANT, engine.tracker)
    events = [event for event in engine.log.events if isinstance(event, PrefixMatched)]
    shown = [redactor.redact(event) for event in events]
    assert events[2].reason == "evicted"
    assert events[2].other_id == names[1]
    assert [event.request_id for event in shown if event is not None] == [names[0], names[2]]
    assert names[1] not in json.dumps([_strings(json.loads(encode_event(event))) for event in shown if event])


def test_no_field_of_a_step_has_the_ids_of_other_keys() -> None:
    engine = TrackedEngine()
    name = engine.add([1], 2, tenant="beta-secret")
    engine.to_end()
    step = next(event for event in engine.log.events if isinstance(event, Step))
    fields = {
        each.name: {name: 3} if isinstance(getattr(step, each.name), dict) else getattr(step, each.name)
        for each in dataclasses.fields(step)
    }
    shown = Redactor(TENANT, engine.tracker).redact(Step(**{**fields, "displaced": {name: name}, "head_id": name}))
    assert name not in _strings(json.loads(encode_event(shown)))


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for part in parts for text in _strings(part)]


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
