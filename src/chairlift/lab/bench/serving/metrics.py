"""The metrics of `chairlift bench serve`, computed from the records of its requests, and the objectives of goodput."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from chairlift.errors import ConfigError
from chairlift.lab.bench.distribution import Distribution
from chairlift.lab.bench.serving.http_client import RequestRecord

LATENCIES: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E latency"}
"""The latencies: the name in vLLM's benchmark and the label in tables."""

GOODPUT_SYNTAX: Final = "ttft:MS tpot:MS e2el:MS, each at most once"


@dataclass(frozen=True, slots=True)
class Objectives:
    """Latency objectives in seconds; None is no limit.

    Goodput is the rate of requests that meet all of them: Zhong et al., DistServe (OSDI'24). The text form is that of
    vLLM's benchmark.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Objectives | None:
        """Parse texts like `ttft:500`, in milliseconds. A text may have several, separated by spaces or commas.

        Returns:
            None if there is no objective.

        Raises:
            ConfigError: a text has another form, or a name is unknown or occurs twice.
        """
        seconds: dict[str, float] = {}
        for text in (part for whole in texts for part in re.split(r"[\s,]+", whole) if part):
            name, _, value = text.partition(":")
            if name not in cls.__slots__ or name in seconds:
                raise ConfigError(f"goodput {text!r}: write {GOODPUT_SYNTAX}")
            seconds[name] = _milliseconds(text, value) / 1e3
        return cls(**seconds) if seconds else None

    def are_met(self, record: RequestRecord) -> bool:
        """Whether a request meets the objectives. A failed request does not; a missing TPOT (an answer of one token or
        of one chunk) meets any limit."""
        measured = ((self.ttft, record.ttft), (self.tpot, record.tpot), (self.e2el, record.e2e_latency))
        return record.is_answered and all(
            limit is None or seconds is None or seconds <= limit for limit, seconds in measured
        )


def _milliseconds(text: str, value: str) -> float:
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = -1.0
    if not milliseconds > 0:
        raise ConfigError(
            f"goodput {text!r}: {value!r} is not a positive number of milliseconds; write {GOODPUT_SYNTAX}"
        )
    return milliseconds


@dataclass(frozen=True, slots=True)
class FailureCount:
    """The number of requests that failed in one way, and the error message of the first one."""

    kind: str
    count: int
    first_message: str


@dataclass(frozen=True, slots=True)
class ServeMetrics:
    """Metrics of a workload from its start to the end of its last request, in seconds and per second.

    Attributes:
        duration: time from the start to the end of the last request.
        completed: number of requests with a complete answer. Tokens, rates and latencies are over these.
        failed: number of other requests.
        total_input_tokens: prompt tokens as counted by the server, or as requested if it does not count.
        requested_input_tokens: prompt tokens as requested.
        cached_tokens: input tokens that the server found in its cache.
        request_goodput: rate of requests that met the objectives; None without objectives.
        mean_concurrent_requests: mean over time of the number of concurrent requests.
        max_concurrent_requests: maximum of that number.
        latencies: by the names in LATENCIES, from the sending of a request; None if no request has one.
        send_lag: delay between the time at which a request was due and its sending, over all requests.
        failures: by kind, the most frequent first.
        num_counted_by_usage: number of answers whose tokens the server counted. In others, a chunk counts as a token.
        num_short: number of answers with fewer tokens than requested.
        num_unstreamed: number of answers with several tokens in one chunk.
        num_chunks: number of chunks with text.
    """

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    requested_input_tokens: int
    cached_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    mean_concurrent_requests: float
    max_concurrent_requests: int
    latencies: dict[str, Distribution | None]
    send_lag: Distribution
    failures: list[FailureCount]
    num_counted_by_usage: int
    num_short: int
    num_unstreamed: int
    num_chunks: int

    @classmethod
    def from_records(
        cls, records: Sequence[RequestRecord], objectives: Objectives | None, percents: Sequence[float]
    ) -> ServeMetrics:
        """Compute the metrics of at least one request. Times in the records are since the start of the workload."""
        answered = [record for record in records if record.is_answered]
        duration = max(record.ended for record in records)
        lag = Distribution.from_values([record.send_lag for record in records], percents)
        assert lag is not None
        input_tokens = sum(_input_tokens(record) for record in answered)
        output_tokens = sum(record.num_output_tokens for record in answered)
        return cls(
            duration=duration,
            completed=len(answered),
            failed=len(records) - len(answered),
            total_input_tokens=input_tokens,
            requested_input_tokens=sum(record.input_len for record in answered),
            cached_tokens=sum(record.usage.cached_tokens for record in answered if record.usage is not None),
            total_output_tokens=output_tokens,
            request_throughput=len(answered) / duration,
            request_goodput=None if objectives is None else sum(map(objectives.are_met, answered)) / duration,
            output_throughput=output_tokens / duration,
            total_token_throughput=(input_tokens + output_tokens) / duration,
            mean_concurrent_requests=sum(record.ended - record.sent for record in records) / duration,
            max_concurrent_requests=peak_concurrency(records),
            latencies=_latencies(answered, percents),
            send_lag=lag,
            failures=count_failures(records),
            num_counted_by_usage=sum(record.usage is not None for record in answered),
            num_short=sum(record.num_output_tokens < record.output_len for record in answered),
            num_unstreamed=sum(record.num_output_tokens > 1 == len(record.chunk_times) for record in answered),
            num_chunks=sum(len(record.chunk_times) for record in answered),
        )

    def to_dict(self, latencies: Sequence[str]) -> dict[str, Any]:
        """The metrics for JSON under the names of vLLM's benchmark. The given latencies and the send lag are in
        milliseconds."""
        values = {name: getattr(self, name) for name in self.__slots__ if name not in ("latencies", "send_lag")}
        values["failures"] = {
            failure.kind: {"count": failure.count, "first_message": failure.first_message} for failure in self.failures
        }
        for name, distribution in [*((name, self.latencies[name]) for name in latencies), ("send_lag", self.send_lag)]:
            if distribution is not None:
                statistics = distribution.to_dict().items()
                values |= {f"{key}_{name}_ms": value * 1e3 for key, value in statistics if key != "count"}
        return values


def count_failures(records: Sequence[RequestRecord]) -> list[FailureCount]:
    """Count failures by kind, the most frequent first. The message is that of the request that was due first."""
    messages: dict[str, list[str]] = {}
    for record in records:
        if record.failure is not None:
            messages.setdefault(record.failure.kind, []).append(record.failure.message)
    counts = [FailureCount(kind, len(texts), texts[0]) for kind, texts in messages.items()]
    return sorted(counts, key=lambda failure: -failure.count)


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """The maximum number of concurrent requests. Requests are not concurrent if one is sent when the other one ends."""
    changes = sorted([(record.sent, 1) for record in records] + [(record.ended, -1) for record in records])
    peak = concurrent = 0
    for _, change in changes:
        concurrent += change
        peak = max(peak, concurrent)
    return peak


def _input_tokens(record: RequestRecord) -> int:
    return record.input_len if record.usage is None else record.usage.prompt_tokens


def _latencies(answered: Sequence[RequestRecord], percents: Sequence[float]) -> dict[str, Distribution | None]:
    values: dict[str, list[float | None]] = {
        "ttft": [record.ttft for record in answered],
        "tpot": [record.tpot for record in answered],
        "itl": [gap for record in answered for gap in record.itls],
        "e2el": [record.e2e_latency for record in answered],
    }
    return {
        name: Distribution.from_values([value for value in seconds if value is not None], percents)
        for name, seconds in values.items()
    }
