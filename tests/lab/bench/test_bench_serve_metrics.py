"""Metrics of requests, goodput and concurrency without a socket, and the prompts that are sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift.lab.bench.distribution import Distribution
from chairlift.lab.bench.serving.http_client import HttpFailure, RequestRecord, Usage
from chairlift.lab.bench.serving.metrics import Objectives, ServeMetrics, peak_concurrency
from chairlift.lab.bench.serving.prompts import ChatPrompts, prompt_text
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.request_feed import RequestFeed


def make_record(
    sent: float, first: float, ended: float, tokens: int, *, due: float = 0.0, failed: bool = False
) -> RequestRecord:
    times = [first, ended] if tokens > 1 else [first]
    made = RequestRecord("r", 10, tokens, due=due, sent=sent, chunk_times=times, ended=ended)
    made.usage = Usage(12, tokens)
    made.failure = HttpFailure("http 500", "no") if failed else None
    return made


def test_latencies_are_measured_from_the_sending() -> None:
    made = make_record(sent=1.0, first=1.5, ended=3.5, tokens=5, due=0.75)
    assert made.send_lag == 0.25
    assert made.ttft == 0.5
    assert made.tpot == 0.5
    assert made.e2e_latency == 2.5
    assert made.itls == [2.0]


@pytest.mark.parametrize(
    ("texts", "objectives"),
    [
        ((), None),
        (("ttft:500",), Objectives(ttft=0.5)),
        (("ttft:500", "tpot:20", "e2el:2000"), Objectives(0.5, 0.02, 2.0)),
        (("ttft:500 tpot:20, e2el:2000",), Objectives(0.5, 0.02, 2.0)),
    ],
)
def test_objectives_are_parsed(texts: tuple[str, ...], objectives: Objectives | None) -> None:
    assert Objectives.parse(texts) == objectives


@pytest.mark.parametrize("text", ["itl:5", "ttft", "ttft:", "ttft:-1", "ttft:nan", "ttft:1 ttft:2", "parse:3"])
def test_errors_name_the_objective(text: str) -> None:
    with pytest.raises(ConfigError, match="goodput"):
        Objectives.parse([text])


def test_goodput_counts_requests_that_meet_all_objectives() -> None:
    records = [
        make_record(0.0, 0.5, 2.5, 5),
        make_record(0.0, 0.6, 2.5, 5),
        make_record(0.0, 0.5, 4.0, 5),
        make_record(0.0, 0.4, 0.4, 1),
        make_record(0.0, 0.1, 0.2, 2, failed=True),
    ]
    objectives = Objectives(ttft=0.5, tpot=0.5)
    assert [objectives.are_met(made) for made in records] == [True, False, False, True, False]
    metrics = ServeMetrics.from_records(records, objectives, (99.0,))
    assert metrics.duration == 4.0
    assert metrics.request_goodput == 2 / 4.0
    assert metrics.request_throughput == 4 / 4.0
    assert metrics.output_throughput == 16 / 4.0
    assert metrics.total_token_throughput == (4 * 12 + 16) / 4.0
    assert metrics.mean_concurrent_requests == pytest.approx((2.5 + 2.5 + 4.0 + 0.4 + 0.2) / 4.0)
    assert metrics.max_concurrent_requests == 5
    assert [(failure.kind, failure.count) for failure in metrics.failures] == [("http 500", 1)]


def test_names_in_json_are_those_of_vllm() -> None:
    record = ServeMetrics.from_records([make_record(0.0, 0.5, 2.5, 5)], None, (99.0, 99.9)).to_dict(["ttft", "tpot"])
    assert record["mean_ttft_ms"] == record["p99_ttft_ms"] == record["p99.9_ttft_ms"] == 500
    assert record["median_tpot_ms"] == 500
    assert not any("e2el" in name for name in record)
    assert record["request_goodput"] is None


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), min_size=1, max_size=12))
def test_peak_concurrency_is_the_maximum_over_time(spans: list[tuple[int, int]]) -> None:
    records = [make_record(start, start + length, start + length, 1) for start, length in spans]
    concurrent = [sum(start <= moment < start + length for start, length in spans) for moment in range(31)]
    assert peak_concurrency(records) == max(concurrent)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_a_distribution_has_the_extremes_and_the_median(values: list[float]) -> None:
    found = Distribution.from_values(values, (0.0, 50.0, 100.0))
    assert found is not None
    assert found.percentiles == {0.0: min(values), 50.0: found.median, 100.0: max(values)}
    assert found.min - 1e-6 <= found.mean <= found.max + 1e-6


def conversation() -> list[WorkloadRequest]:
    first = WorkloadRequest("a", 0.0, [1, 2], 3)
    return [
        first,
        WorkloadRequest("b", 1.0, [4], 2, after="a", carries_history=True),
        WorkloadRequest("c", 0.0, [1], 1),
    ]


def test_chat_prompts_contain_the_previous_answers() -> None:
    workload = conversation()
    feed, prompts = RequestFeed(workload), ChatPrompts(workload)
    for request in feed.pop_due(0.0):
        prompts.fields(request)
        prompts.record_answer(request.request_id, f"answer to {request.request_id}")
        feed.finish(request.request_id, [9] * request.output_len, 0.5)
    (follower,) = feed.pop_due(2.0)
    assert prompts.fields(follower)["messages"] == [
        {"role": "user", "content": prompt_text([1, 2])},
        {"role": "assistant", "content": "answer to a"},
        {"role": "user", "content": prompt_text([4])},
    ]
