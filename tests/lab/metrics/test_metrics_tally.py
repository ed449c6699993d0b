"""Metrics that are computed event by event equal those of the whole list of events."""

from __future__ import annotations

from chairlift.events import SLOT_KINDS, EngineStarted, Event, RequestArrived, RequestFinished, Step
from chairlift.lab.metrics.requests import RequestMetrics, RequestTally, request_metrics
from chairlift.lab.metrics.run import RunTally, summarize
from support.fakes import make_engine, make_request, run_to_end

STATIC = EngineStarted(
    0.0, "m", 4, 10, 8, 64, 40, "fcfs", "paged", True, batching="static", static_batch_size=2, static_run_to="batch"
)


def step(number: int, start: float, end: float, rows: dict[str, tuple[int, int, int]], **fields: object) -> Step:
    """`rows`: request id -> (tokens computed, tokens computed before, new tokens)."""
    columns = [list(column) for column in zip(*rows.values(), strict=True)]
    defaults = {"admitted": [], "preempted": [], "finished": [], "num_waiting": 0, "free_blocks": 0}
    happened = {**defaults, "evictable_blocks": 0, "num_running": len(rows), **fields}
    return Step(end, number, start, list(rows), *columns, **happened)  # type: ignore[arg-type]


def finished(request_id: str, time: float, outputs: int) -> RequestFinished:
    return RequestFinished(time, request_id, "length", 1, outputs, 0, 0, 0.0, 0.0, 0.5)


BATCH: list[Event] = [
    STATIC,
    RequestArrived(0.0, "a", 4, 3),
    RequestArrived(0.0, "b", 2, 1),
    RequestArrived(1.0, "late", 2, 1),
    step(0, 0.0, 1.0, {"a": (4, 0, 1), "b": (2, 0, 1)}, admitted=["a", "b"], num_padding=[0, 2], internal=40),
    step(1, 1.0, 1.5, {"a": (1, 4, 1), "b": (0, 2, 0)}, num_padding=[0, 1], internal=20, free=20),
    finished("a", 2.0, 3),
    finished("b", 2.0, 1),
    step(2, 1.5, 2.0, {"a": (1, 5, 1), "b": (0, 2, 0)}, num_padding=[0, 1], finished=["a", "b"], internal=40),
]


def test_a_static_batch_returns_tokens_when_it_ends() -> None:
    a, b, late = request_metrics(BATCH)
    assert (a.token_times, b.token_times, late.token_times) == ([2.0, 2.0, 2.0], [2.0], [])
    assert (a.ttft, a.e2e_latency, b.ttft, late.ttft) == (2.0, 2.0, 2.0, None)
    assert (a.itls, a.tpot, a.normalized_latency) == ([], None, 2 / 3)
    run = summarize(BATCH)
    assert (run.itl, run.tpot, run.padding_tokens, run.output_tokens) == (None, None, 4, 4)
    assert (run.num_answered, run.num_unfinished) == (2, 1)
    assert (run.mean_batch_size, run.mean_busy_seats) == (2, 4 / 3)


def test_only_streams_have_a_quality_of_experience() -> None:
    core, _, _, events = make_engine()
    for name in ("stream", "whole"):
        core.add(make_request(name, [1, 2], 4, is_streamed=name == "stream"))
    run_to_end(core)
    assert [metrics.qoe for metrics in request_metrics(events.events)] == [1, None]


def test_an_aborted_member_of_a_static_batch_has_no_tokens() -> None:
    core, _, _, events = make_engine(batching="static", static_batch_size=2)
    for name in ("gone", "stays"):
        core.add(make_request(name, [1, 2], 4))
    core.step()
    core.abort("gone")
    run_to_end(core)
    started = [STATIC, *events.events]
    gone, stays = request_metrics(started)
    assert (gone.ttft, gone.token_times, len(stays.token_times)) == (None, [], 4)
    assert summarize(started).output_tokens == 4


def test_memory_is_a_mean_over_time_and_recomputed_tokens_are_a_sum() -> None:
    assert summarize(BATCH).memory == dict(zip(SLOT_KINDS, (0, 0, (40 + 10 + 20) / 80, 0, 10 / 80), strict=True))
    assert summarize([STATIC, step(0, 0.0, 1.0, {"a": (1, 0, 0)})]).memory is None, "the log does not say"
    steps = [step(i, i, i + 1.0, {"a": (5, 0, 0)}, num_recomputed=i) for i in range(4)]
    assert summarize(steps).recomputed_tokens == 6


def test_an_intermediate_result_changes_nothing() -> None:
    tally = RunTally()
    for index, event in enumerate(BATCH):
        tally.emit(event)
        assert tally.result() == summarize(BATCH[: index + 1])


def test_complete_requests_are_passed_on_immediately() -> None:
    given_away: list[tuple[int, RequestMetrics]] = []
    tally = RequestTally(lambda index, metrics: given_away.append((index, metrics)))
    for event in BATCH:
        tally.emit(event)
    assert [(index, metrics.request_id) for index, metrics in given_away] == [(0, "a"), (1, "b")]
    assert [(index, metrics.request_id) for index, metrics in tally.incomplete()] == [(2, "late")]
