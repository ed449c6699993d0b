"""Every listener gets the events in order; a slow listener loses events and does not delay others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift import AsyncLLM, SamplingParams
from chairlift.engine import event_hub
from chairlift.engine.event_hub import EventHub
from chairlift.events import Event, EventList, RequestRejected, Step
from support.waiting import AMPLE_SECONDS, until


def rejected(number: int) -> RequestRejected:
    return RequestRejected(float(number), str(number), "")


def step(number: int) -> Step:
    return Step(float(number), number, 0.0, [], [], [], [], [], [], [], 0, 0, 0, 0)


def numbers(events: list[Event]) -> list[int]:
    return [int(event.time) for event in events]


async def test_events_of_another_thread_arrive_in_order_on_the_loop() -> None:
    hub, heard, threads = EventHub(), EventList(), set()

    class Noting:
        def emit(self, event: Event) -> None:
            threads.add(threading.current_thread())
            heard.emit(event)

    hub.emit(rejected(0))
    hub.add(Noting())
    hub.open(asyncio.get_running_loop())
    emitter = threading.Thread(target=lambda: [hub.emit(rejected(n)) for n in range(1, 5000)])
    emitter.start()
    while len(heard.events) < 5000:
        await asyncio.sleep(0)
    emitter.join()
    assert numbers(heard.events) == list(range(5000))
    assert threads == {threading.current_thread()}


async def test_a_blocked_loop_drops_step_events_and_no_request_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_hub, "PENDING_EVENTS", 4)

    hub, heard = EventHub(), EventList()
    hub.add(heard)
    hub.open(asyncio.get_running_loop())
    for number in range(9):
        hub.emit(step(number))
    hub.emit(rejected(9))
    await asyncio.sleep(0)
    hub.emit(step(10))
    await asyncio.sleep(0)
    assert numbers(heard.events) == [0, 1, 2, 3, 9, 10]
    assert hub.num_dropped == 5


def test_a_failing_listener_is_removed_and_others_continue() -> None:
    class Failing:
        def emit(self, event: Event) -> None:
            raise OSError("no space")

    hub, heard = EventHub(), EventList()
    hub.add(Failing())
    hub.add(heard)
    hub.publish([rejected(1), rejected(2)])
    assert numbers(heard.events) == [1, 2]


async def test_listeners_get_every_event_of_an_engine(tiny_model_dir: Callable[..., Path]) -> None:
    llm = AsyncLLM(model=str(tiny_model_dir("llama")), num_kv_blocks=60, skip_tokenizer_init=True, num_threads=1)
    heard = EventList()
    llm.events.add(heard)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    await llm.start(None, [5, 6], params).collect()
    await until(lambda: len(heard.events) >= 7)
    assert [event.type for event in heard.events] == [
        "engine_started", "request_arrived", "prefix_matched", "step", "step", "request_finished", "step",
    ]  # fmt: skip
    status = llm.status()
    assert (status.state, status.restarts, status.num_unfinished) == ("running", 0, 0)
    assert 0 <= status.seconds_since_step < AMPLE_SECONDS
    llm.close()
    assert llm.status().state == "dead"
