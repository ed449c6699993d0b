"""Checks metrics of hand-written events, summaries of numbers and the quality of experience against values by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.events import EngineStarted, Event, RequestArrived, RequestFinished, RequestRejected, Step, from_json
from chairlift.lab.metrics.requests import ReadingCurve, RequestMetrics, request_metrics
from chairlift.lab.metrics.run import Summary, summarize
from chairlift.observability.event_log import encode_event
from chairlift.slo import SLO

STARTED = EngineStarted(0.0, "m", 4, 10, 8, 64, 40, "fcfs", "paged", True)


def arrived(request_id: str, time: float, prompt: int, leader_id: str | None = None) -> RequestArrived:
    return RequestArrived(time, request_id, prompt, max_tokens=8, leader_id=leader_id)


def finished(request_id: str, time: float, outputs: int, reason: str = "length") -> RequestFinished:
    return RequestFinished(time, request_id, reason, 1, outputs, 0, 0, 0.0, None, None)


def step(
    number: int, start: float, end: float, rows: list[tuple[str, int, int, int]], free: int = 10, **lists: list[str]
) -> Step:
    """`rows`: (request id, tokens computed, tokens computed before, new tokens)."""
    ids, scheduled, computed, new = (list(column) for column in zip(*rows, strict=True))
    happened: dict[str, Any] = {"admitted": [], "preempted": [], "finished": [], **lists}
    return Step(
        end, number, start, ids, scheduled, computed, new, **happened, num_running=len(rows), num_waiting=0,
        free_blocks=free, evictable_blocks=0,
    )  # fmt: skip


def test_errors_of_predicted_lengths_are_summarized() -> None:
    events: list[Event] = [STARTED]
    for name, predicted, tokens in (("a", 5, 2), ("b", 1, 2), ("c", 2, 2)):
        events += [
            replace(arrived(name, 0.0, 3), predicted_len=predicted),
            step((len(events) - 1) // 3, 0.0, 1.0, [(name, 3, 0, tokens)], admitted=[name], finished=[name]),
            finished(name, 1.0, tokens),
        ]
    run = summarize(events)
    assert run.length_error is not None
    assert (run.length_error.mean, run.length_error.max, run.length_coverage) == (4 / 3, 3, 2 / 3)
    without = summarize([STARTED, arrived("a", 0.0, 3)])
    assert (without.length_error, without.length_coverage) == (None, None)


def test_draft_tokens_are_summed() -> None:
    drafted = replace(step(0, 1.0, 2.0, [("a", 5, 9, 3), ("b", 1, 4, 1)]), num_draft=[4, 0])
    assert (drafted.num_kept, drafted.num_rejected, drafted.num_accepted) == ([3, 1], [2, 0], 2)
    run = summarize([STARTED, drafted, step(1, 2.0, 3.0, [("a", 1, 12, 1)])])
    assert (run.draft_tokens, run.accepted_draft_tokens) == (4, 2)
    assert run.values()["draft_acceptance"] == 0.5


def test_values_without_requests_or_draft_tokens() -> None:
    assert not [name for name in summarize(CHUNKED).values() if "draft" in name]
    run = summarize([STARTED])
    assert (run.duration, run.output_tokens_per_s, run.mean_batch_size, run.num_steps) == (0.0, 0.0, 0.0, 0)
    assert run.ttft is None


# Request a has a prompt of 10 in two chunks; b waits for the second step. A request's end comes before its last step.
CHUNKED: list[Event] = [
    STARTED,
    arrived("a", 1.0, 10),
    step(0, 1.5, 2.0, [("a", 6, 0, 0)], free=8, admitted=["a"]),
    arrived("b", 1.75, 3),
    step(1, 2.0, 3.0, [("a", 4, 6, 1), ("b", 3, 0, 1)], free=6, admitted=["b"]),
    finished("b", 3.5, 2, "stop"),
    step(2, 3.0, 3.5, [("a", 1, 10, 1), ("b", 1, 3, 1)], free=6, finished=["b"]),
    finished("a", 5.0, 3),
    step(3, 3.5, 5.0, [("a", 1, 11, 1)], free=7, finished=["a"]),
]


def only(events: list[Event], request_id: str) -> RequestMetrics:
    (found,) = [request for request in request_metrics(events) if request.request_id == request_id]
    return found


def test_latencies_of_a_chunked_prefill() -> None:
    a, b = request_metrics(CHUNKED)
    assert (a.ttft, a.queue_time, a.e2e_latency, a.tpot) == (2.0, 0.5, 4.0, 1.0)
    assert a.itls == [0.5, 1.5]
    assert (b.ttft, b.queue_time, b.e2e_latency, b.tpot) == (1.25, 0.25, 1.75, 0.5)
    assert (a.finish_reason, b.finish_reason) == ("length", "stop")


def test_summarize_a_run() -> None:
    run = summarize(CHUNKED)
    assert run.duration == 4.0
    assert (run.num_requests, run.num_answered, run.num_unfinished, run.num_rejected) == (2, 2, 0, 0)
    assert (run.prompt_tokens, run.output_tokens, run.cached_tokens) == (13, 5, 0)
    assert (run.output_tokens_per_s, run.total_tokens_per_s, run.requests_per_s) == (1.25, 4.5, 0.5)
    assert (run.num_steps, run.mean_batch_size, run.peak_batch_size) == (4, 1.5, 2)
    assert run.mean_batch_tokens == (6 + 7 + 2 + 1) / 4
    assert run.kv_use_mean == pytest.approx((0.2 + 0.4 + 0.4 + 0.3) / 4)
    assert run.kv_use_peak == pytest.approx(0.4)
    assert run.ttft is not None
    assert (run.ttft.p50, run.ttft.max) == (1.625, 2.0)
    assert run.itl is not None
    assert (run.itl.count, run.itl.p50) == (3, 0.5)


def test_metrics_of_a_log_equal_those_of_its_events() -> None:
    run = summarize(CHUNKED)
    assert summarize([from_json(encode_event(event)) for event in CHUNKED]) == run
    assert json.loads(json.dumps(asdict(run)))["ttft"]["p50"] == 1.625


def test_a_preempted_request_is_counted_once() -> None:
    """b is preempted after its first token and resumes with 4 cached tokens."""
    events: list[Event] = [
        STARTED,
        arrived("b", 0.0, 6),
        step(0, 0.0, 1.0, [("b", 6, 0, 1)], admitted=["b"]),
        step(1, 1.0, 2.0, [("x", 1, 9, 1)], preempted=["b"]),
        step(2, 2.0, 4.0, [("b", 3, 4, 1)], admitted=["b"]),
        finished("b", 5.0, 3),
        step(3, 4.0, 5.0, [("b", 1, 7, 1)], finished=["b"]),
    ]
    b = only(events, "b")
    assert (b.queue_time, b.num_cached_tokens) == (0.0, 0)
    assert (b.ttft, b.itls) == (1.0, [3.0, 1.0])
    run = summarize(events)
    assert run.preemptions == 1
    assert run.output_tokens == 3, "x never arrived: only requests of this log count"


def test_siblings_share_the_prompt_and_count_each() -> None:
    events: list[Event] = [
        STARTED,
        arrived("r-0", 0.0, 9),
        arrived("r-1", 0.0, 9, leader_id="r-0"),
        step(0, 0.0, 1.0, [("r-0", 9, 0, 1)], admitted=["r-0"]),
        finished("r-0", 2.0, 2),
        finished("r-1", 2.0, 1),
        step(1, 1.0, 2.0, [("r-0", 1, 9, 1), ("r-1", 1, 8, 1)], admitted=["r-1"], finished=["r-0", "r-1"]),
    ]
    run = summarize(events)
    assert (run.num_requests, run.num_answered, run.prompt_tokens, run.cached_tokens) == (2, 2, 18, 8)
    sibling = only(events, "r-1")
    assert (sibling.queue_time, sibling.ttft, sibling.tpot, sibling.itls) == (1.0, 2.0, None, [])


def test_tokens_of_one_step_have_zero_latency_between_them() -> None:
    events: list[Event] = [
        arrived("a", 0.0, 2),
        step(0, 0.0, 1.0, [("a", 2, 0, 1)], admitted=["a"]),
        finished("a", 2.0, 4),
        step(1, 1.0, 2.0, [("a", 4, 2, 4)], finished=["a"]),
    ]
    a = only(events, "a")
    assert a.num_output_tokens == 4, "what was sampled past the end does not count"
    assert a.itls == [1.0, 0.0, 0.0]
    assert summarize(events).kv_use_mean is None, "the size of the pool is not known"


def test_aborted_rejected_and_unfinished_requests_are_counted() -> None:
    events: list[Event] = [
        STARTED,
        RequestRejected(0.0, "big", "does not fit"),
        arrived("gone", 0.0, 2),
        arrived("open", 0.0, 3),
        arrived("queued", 0.5, 5),
        step(0, 0.0, 1.0, [("gone", 2, 0, 1), ("open", 3, 0, 1)], admitted=["gone", "open"]),
        finished("gone", 1.5, 1, "abort"),
        step(1, 1.0, 2.0, [("gone", 1, 2, 1), ("open", 1, 3, 1)]),
    ]
    run = summarize(events)
    assert (run.num_requests, run.num_answered, run.num_unfinished, run.num_rejected) == (3, 0, 2, 1)
    assert run.output_tokens == 3, "the token that was in flight at the abort was not delivered"
    assert run.prompt_tokens == 5
    assert run.e2e_latency is None
    assert only(events, "queued").queue_time is None


def test_a_reused_request_id_is_a_new_request() -> None:
    """A step in flight when the first one ended still names it; it must not give the second one a token."""
    events: list[Event] = [
        arrived("a", 0.0, 2),
        step(0, 0.0, 1.0, [("a", 2, 0, 1)], admitted=["a"]),
        finished("a", 2.0, 2),
        step(1, 1.0, 2.0, [("a", 1, 2, 1)], finished=["a"]),
        arrived("a", 2.5, 2),
        step(2, 2.0, 3.0, [("a", 1, 3, 1)]),
        finished("a", 5.0, 1),
        step(3, 3.0, 5.0, [("a", 2, 0, 1)], admitted=["a"], finished=["a"]),
    ]
    first, second = request_metrics(events)
    assert first.token_times == [1.0, 2.0]
    assert (second.token_times, second.queue_time) == ([5.0], 0.5)


def test_goodput_counts_requests_within_their_slo() -> None:
    assert not [name for name in summarize(CHUNKED).values() if "slo" in name or name == "goodput"]
    events: list[Event] = [STARTED]
    for name, slo in (("met", {"ttft_ms": 1000, "tpot_ms": 500}), ("late", {"ttft_ms": 999, "tpot_ms": None})):
        events.append(replace(arrived(name, 0.0, 1), slo=slo))
    events.append(step(0, 0.0, 1.0, [("met", 1, 0, 1), ("late", 1, 0, 1)], admitted=["met", "late"]))
    events += [
        replace(finished(name, 2.0, 3), first_scheduled_time=0.0, first_token_time=1.0) for name in ("met", "late")
    ]
    values = summarize([*events, step(1, 1.0, 4.0, [("other", 1, 0, 1)])]).values()
    assert (values["num_with_slo"], values["num_met_slo"]) == (2, 1)
    assert (values["goodput"], values["slo_attainment"]) == (0.25, 0.5)


NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(NUMBERS)
def test_summary(values: list[float]) -> None:
    summary = Summary.from_values(values)
    assert summary is not None
    assert summary.count == len(values)
    assert summary.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)
    assert summary.p50 <= summary.p90 <= summary.p99 <= summary.max == max(values)


def test_summaries_of_few_values() -> None:
    summary = Summary.from_values([4.0, 1.0, 2.0, 3.0])
    assert summary is not None
    assert (summary.p50, summary.p90, summary.p99) == pytest.approx((2.5, 3.7, 3.97))
    assert Summary.from_values([]) is None


def qoe(times: list[float], slo: SLO | None = None) -> float | None:
    curve = ReadingCurve(2.0, slo)
    for time in times:
        curve.add(time)
    return curve.qoe()


def test_a_reader_who_never_waits_has_the_best_experience() -> None:
    assert qoe([]) is None
    assert qoe([0.1]) == qoe([0.0] * 10) == qoe([1.0, 1.5, 2.0]) == 1
    assert qoe([0.5, 1.0], SLO(ttft_ms=500)) == 1


def test_delays_are_a_share_of_the_time_of_reading() -> None:
    # Two tokens are expected at 1 s and 1.5 s, are read at 3 s and 3.5 s, and the second one has been read at 4 s.
    assert qoe([3.0, 3.0]) == pytest.approx(1 - (2 + 2) / (3 + 2.5))
    assert qoe([1.0, 1.5, 4.0]) == pytest.approx(1 - 2 / (3.5 + 3 + 2.5))
    assert qoe([3.0, 3.0], SLO(tpot_ms=5)) == qoe([3.0, 3.0])
    assert qoe([3.0, 3.0], SLO(ttft_ms=3000)) == 1


def test_a_longer_stall_is_worse() -> None:
    values = [qoe([1.0, 1.0, 1.0, 1.0, stall, stall]) for stall in (2.0, 4.0, 8.0, 16.0)]
    assert values == sorted(values, reverse=True)  # type: ignore[type-var]
    assert len(set(values)) == 4
