"""benchmarks/seats.py on a tiny model: the claims hold, and each claim fails if the events contradict it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from chairlift.config import EngineConfig
from chairlift.engine.startup.factory import build_engine
from chairlift.events import Event, EventList, Step


@pytest.fixture(scope="module")
def seats() -> ModuleType:
    return importlib.import_module("benchmarks.seats")


@pytest.fixture(scope="module")
def events(seats: ModuleType, tiny_model_dir: Callable[..., Path]) -> list[Event]:
    """A run with 8 seats."""
    log = EventList()
    config = EngineConfig(
        model=str(tiny_model_dir("llama", max_position_embeddings=512)),
        max_num_seqs=8,
        max_num_batched_tokens=80,
        num_kv_blocks=200,
        skip_tokenizer_init=True,
        num_threads=1,
    )
    engine = build_engine(config, events=log)
    result: list[Event] = seats.run(engine, log, seats.make_requests(0, 400, 256))
    return result


def changed(events: list[Event], index: int, **fields: Any) -> list[Event]:
    """The events with other values in one step."""
    return [replace(e, **fields) if isinstance(e, Step) and e.step == index else e for e in events]


def steps(events: list[Event]) -> list[Step]:
    return [event for event in events if isinstance(event, Step)]


def test_all_claims_hold_for_an_engine(seats: ModuleType, events: list[Event]) -> None:
    report = seats.SeatLog(events).report()
    assert list(report.claims.values()) == [True] * 3
    assert report.num_finished == 49
    assert report.seats_freed == report.seats_taken_next_step == 49 - 8
    assert report.chunk_steps >= 400 / 80
    assert report.decodes_beside >= 7 * (report.chunk_steps - 1)


def test_a_seat_that_stays_empty_fails_the_first_claim(seats: ModuleType, events: list[Event]) -> None:
    late = next(s for s in steps(events) if s.step > 50 and len(s.admitted) == 1)
    after = steps(events)[late.step + 1]
    moved = changed(events, late.step, admitted=[])
    moved = changed(moved, after.step, admitted=[*late.admitted, *after.admitted])
    report = seats.SeatLog(moved).report()
    assert report.seats_taken_next_step == report.seats_freed - 1
    assert list(report.claims.values()) == [False, True, True]


def test_admission_out_of_order_fails_the_first_claim(seats: ModuleType, events: list[Event]) -> None:
    first, second = [s for s in steps(events) if s.step > 50 and len(s.admitted) == 1][:2]
    swap = {first.admitted[0]: second.admitted[0], second.admitted[0]: first.admitted[0]}
    swapped: list[Event] = [
        replace(
            event,
            request_ids=[swap.get(name, name) for name in event.request_ids],
            admitted=[swap.get(name, name) for name in event.admitted],
            finished=[swap.get(name, name) for name in event.finished],
        )
        if isinstance(event, Step)
        else event
        for event in events
    ]
    report = seats.SeatLog(swapped).report()
    assert report.out_of_order > 0
    assert not next(iter(report.claims.values()))


def test_a_skipped_decode_fails_the_second_claim(seats: ModuleType, events: list[Event]) -> None:
    step = next(s for s in steps(events) if s.step > 20 and not s.finished and not s.admitted)
    columns = ("request_ids", "num_scheduled", "num_computed", "num_new")
    report = seats.SeatLog(changed(events, step.step, **{name: getattr(step, name)[1:] for name in columns})).report()
    assert report.decodes_left_out == 1
    assert list(report.claims.values()) == [True, False, True]


def test_a_lost_block_fails_the_third_claim(seats: ModuleType, events: list[Event]) -> None:
    probe = steps(events)[-1]
    report = seats.SeatLog(changed(events, probe.step, free_blocks=probe.free_blocks - 1)).report()
    assert (report.free_blocks, report.num_blocks) == (199, 200)
    assert list(report.claims.values()) == [True, True, False]


def test_the_picture_shows_every_step_of_every_interval(seats: ModuleType, events: list[Event]) -> None:
    log = seats.SeatLog(events)
    cells = list(log.cells())
    drawn = [(cell.seat, cell.step + i) for cell in cells for i in range(cell.length)]
    assert len(drawn) == len(set(drawn)) == sum(len(step.request_ids) for step in log.steps)
    assert sum(cell.length for cell in cells if cell.kind == "end") == 49
    picture = seats.picture(log)
    svg = picture.draw()
    assert len(svg) < 200_000
    assert picture.label.startswith("400 tokens in ")
    kinds = {element.get("class") for element in ElementTree.fromstring(svg).iter()}
    assert {"prefill", "decode", "end", "empty"} <= kinds
