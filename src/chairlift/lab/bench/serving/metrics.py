"""What the calls of a load amount to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from chairlift.lab.bench.distribution import Distribution
from chairlift.lab.bench.serving.goodput import Objectives
from chairlift.lab.bench.serving.http_client import RequestRecord

LATENCIES: Final = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E latency"}
"""The latencies as vLLM's benchmark names them, and as people do."""


@dataclass(frozen=True, slots=True)
class FailureCount:
    """The calls that failed in one way, and what the first of them was told."""

    kind: str
    count: int
    first_message: str


@dataclass(frozen=True, slots=True)
class ServeMetrics:
    """A load from its start to the end of its last call. Rates are a second, times seconds.

    Attributes:
        completed: calls with a whole answer; tokens, rates and latencies are over these alone.
        total_input_tokens: as the server counted where it did, else as they were asked for; requested_input_tokens:
            as they were asked for.
        cached_tokens: of the input tokens, those that the server says it had cached.
        request_goodput: answers that met the objectives; None without objectives.
        mean_concurrent_requests: calls that were out, averaged over time; max_concurrent_requests: at most.
        latencies: by the names of LATENCIES, from when a call was really sent; None where no call has one.
        send_lag: how much later than due the calls were sent, all of them.
        failures: by kind, the most frequent first.
        num_counted_by_usage: answers whose tokens the server counted; the others count one token a chunk.
        num_short: answers with fewer tokens than asked for; num_unstreamed: of several tokens in one piece.
        num_chunks: that carried the answers' text.
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
    def of(
        cls, calls: Sequence[RequestRecord], objectives: Objectives | None, percents: Sequence[float]
    ) -> ServeMetrics:
        """Of at least one call, on a clock that started with the load."""
        answered = [call for call in calls if call.is_answered]
        duration = max(call.ended for call in calls)
        lag = Distribution.of([call.send_lag for call in calls], percents)
        assert lag is not None
        input_tokens = sum(_input_tokens(call) for call in answered)
        output_tokens = sum(call.num_output_tokens for call in answered)
        return cls(
            duration=duration,
            completed=len(answered),
            failed=len(calls) - len(answered),
            total_input_tokens=input_tokens,
            requested_input_tokens=sum(call.input_len for call in answered),
            cached_tokens=sum(call.usage.cached_tokens for call in answered if call.usage is not None),
            total_output_tokens=output_tokens,
            request_throughput=len(answered) / duration,
            request_goodput=None if objectives is None else sum(map(objectives.are_met, answered)) / duration,
            output_throughput=output_tokens / duration,
            total_token_throughput=(input_tokens + output_tokens) / duration,
            mean_concurrent_requests=sum(call.ended - call.sent for call in calls) / duration,
            max_concurrent_requests=peak_concurrency(calls),
            latencies=_latencies(answered, percents),
            send_lag=lag,
            failures=count_failures(calls),
            num_counted_by_usage=sum(call.usage is not None for call in answered),
            num_short=sum(call.num_output_tokens < call.output_len for call in answered),
            num_unstreamed=sum(call.num_output_tokens > 1 == len(call.chunk_times) for call in answered),
            num_chunks=sum(len(call.chunk_times) for call in answered),
        )

    def to_dict(self, shown: Sequence[str]) -> dict[str, Any]:
        """Ready for JSON, flat, under the names of vLLM's benchmark where it has the same; latencies (those of `shown`)
        and lags are in milliseconds."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in ("latencies", "send_lag")}
        plain["failures"] = {
            failure.kind: {"count": failure.count, "first_message": failure.first_message} for failure in self.failures
        }
        for name, distribution in [*((name, self.latencies[name]) for name in shown), ("send_lag", self.send_lag)]:
            if distribution is not None:
                plain |= {f"{key}_{name}_ms": value * 1e3 for key, value in _statistics(distribution).items()}
        return plain


def count_failures(calls: Sequence[RequestRecord]) -> list[FailureCount]:
    """By kind, the most frequent first; the message is that of the call that was due first."""
    messages: dict[str, list[str]] = {}
    for call in calls:
        if call.failure is not None:
            messages.setdefault(call.failure.kind, []).append(call.failure.message)
    counts = [FailureCount(kind, len(texts), texts[0]) for kind, texts in messages.items()]
    return sorted(counts, key=lambda failure: -failure.count)


def peak_concurrency(calls: Sequence[RequestRecord]) -> int:
    """The most calls that were out at one time. One that ends when another one is sent is not out with it."""
    changes = sorted([(call.sent, 1) for call in calls] + [(call.ended, -1) for call in calls])
    peak = out = 0
    for _, change in changes:
        out += change
        peak = max(peak, out)
    return peak


def _input_tokens(call: RequestRecord) -> int:
    return call.input_len if call.usage is None else call.usage.prompt_tokens


def _latencies(answered: Sequence[RequestRecord], percents: Sequence[float]) -> dict[str, Distribution | None]:
    values: dict[str, list[float | None]] = {
        "ttft": [call.ttft for call in answered],
        "tpot": [call.tpot for call in answered],
        "itl": [gap for call in answered for gap in call.itls],
        "e2el": [call.e2e_latency for call in answered],
    }
    return {name: Distribution.of([v for v in seconds if v is not None], percents) for name, seconds in values.items()}


def _statistics(distribution: Distribution) -> dict[str, float]:
    return {name: value for name, value in distribution.to_dict().items() if name != "count"}
