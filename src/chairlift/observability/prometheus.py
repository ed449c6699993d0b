"""Prometheus metrics of a running engine, computed from its events.

Metrics that vLLM has too have its names, units and buckets, so that its dashboards work. The names of other metrics
begin with `chairlift:`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, product
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from chairlift.events import SLOT_KINDS, EngineStarted, RequestFinished, Step
from chairlift.observability.replay import ReplayReader, Rows
from chairlift.observability.tracked_request import TrackedRequest
from chairlift.observability.tracker import RequestTracker
from chairlift.outputs import MissReason
from chairlift.request import FinishReason, WaitReason

TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
STEP_BUCKETS: Final = tuple(map(float, (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)))
COUNT_BUCKETS: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
TOKEN_BUCKETS: Final = tuple(float(digit * 10**power) for power in range(5) for digit in (1, 2, 5))


class BucketCounts:
    """The counts and the sum of a Prometheus histogram."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self._counts[bisect_left(self._buckets, value)] += count
        self._sum += value * count

    def points(self) -> tuple[list[tuple[str, float]], float]:
        """(upper bound, cumulative count) of each bucket, and the sum of all values."""
        bounds = [*map(str, self._buckets), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True)), self._sum


HISTOGRAMS: Final = {
    "vllm:time_to_first_token_seconds": ("Time to first token.", TTFT_BUCKETS),
    "vllm:inter_token_latency_seconds": ("Time between two tokens of a request.", ITL_BUCKETS),
    "vllm:request_time_per_output_token_seconds": ("Mean time per output token of a request.", ITL_BUCKETS),
    "vllm:e2e_request_latency_seconds": ("Time from the arrival to the end of a request.", LATENCY_BUCKETS),
    "vllm:request_queue_time_seconds": ("Time from the arrival of a request to its first step.", LATENCY_BUCKETS),
    "vllm:request_inference_time_seconds": ("Time from the first step of a request to its end.", LATENCY_BUCKETS),
    "vllm:request_prefill_time_seconds": ("Time from the first step of a request to its first token.", LATENCY_BUCKETS),
    "vllm:request_decode_time_seconds": ("Time from the first token of a request to its end.", LATENCY_BUCKETS),
    "vllm:request_prompt_tokens": ("Number of prompt tokens of a request.", TOKEN_BUCKETS),
    "vllm:request_generation_tokens": ("Number of output tokens of a request.", TOKEN_BUCKETS),
    "vllm:request_max_num_generation_tokens": ("Number of output tokens of the longest answer.", TOKEN_BUCKETS),
    "vllm:request_prefill_kv_computed_tokens": ("Prompt tokens that were not found in the cache.", TOKEN_BUCKETS),
    "vllm:request_num_preemptions": ("Number of preemptions of a request.", COUNT_BUCKETS),
    "vllm:request_params_max_tokens": ("`max_tokens` of a request.", TOKEN_BUCKETS),
    "vllm:request_params_n": ("Number of answers to a prompt.", COUNT_BUCKETS),
    "vllm:iteration_tokens_total": ("Number of tokens computed in a step.", STEP_BUCKETS),
}

SLO_RESULTS: Final = ("met", "missed")

COUNTERS: Final[dict[str, tuple[str, dict[str, Iterable[str]]]]] = {
    "vllm:num_preemptions": ("Preemptions of requests.", {}),
    "vllm:prompt_tokens": ("Prompt tokens of admitted requests.", {}),
    "vllm:generation_tokens": ("Output tokens of all requests.", {}),
    "vllm:prompt_tokens_cached": ("Prompt tokens of admitted requests that were found in the prefix cache.", {}),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", {}),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", {}),
    "vllm:request_success": ("Requests that ended, by finish reason.", {"finished_reason": FinishReason}),
    "vllm:spec_decode_num_drafts": ("Proposals of draft tokens that were verified.", {}),
    "vllm:spec_decode_num_draft_tokens": ("Draft tokens that were verified.", {}),
    "vllm:spec_decode_num_accepted_tokens": ("Draft tokens that were accepted.", {}),
    "vllm:spec_decode_num_accepted_tokens_per_pos": (
        "Draft tokens that were accepted, by their position in the proposal.",
        {"position": ()},
    ),
    "chairlift:prefix_cache_disk_tokens": ("Prompt tokens that were loaded from the prefix cache on disk.", {}),
    "chairlift:prefix_cache_missed_tokens": (
        "Prompt tokens that the prefix cache could have had, by the reason of the first one that it had not.",
        {"reason": [reason for reason in MissReason if reason is not MissReason.OTHER_SALT]},
    ),
    "chairlift:requests_rejected": ("Requests rejected because they exceed a limit of the engine.", {}),
    "chairlift:state_checkpoint_evictions": ("Checkpoints of recurrent states that were evicted.", {}),
    "chairlift:steps": ("Computed steps.", {}),
    "chairlift:length_predictions": ("Requests with a predicted output length that were answered.", {}),
    "chairlift:length_error_tokens": ("Differences of predicted and true output lengths of these requests.", {}),
    "chairlift:length_predictions_covered": ("These requests whose output was not longer than predicted.", {}),
    "chairlift:slo_requests": ("Requests with an SLO that ended, by whether they met it.", {"result": SLO_RESULTS}),
    "chairlift:swaps": ("Preemptions of requests whose K and V were kept in the swap space.", {}),
    "chairlift:swapped_blocks": ("Blocks copied from and to the swap space.", {"direction": ("in", "out")}),
    "chairlift:recomputed_tokens": ("Tokens computed again after preemptions.", {}),
    "chairlift:padding_tokens": ("Padding tokens computed for static batches.", {}),
    "chairlift:preempted_seconds": ("Seconds that requests waited after preemptions.", {}),
    "chairlift:wait_steps": ("Steps scheduled while a request waited, by reason.", {"reason": WaitReason}),
    "chairlift:wait_seconds": ("Seconds that requests waited, by reason.", {"reason": WaitReason}),
    "chairlift:kv_slot_seconds": ("KV slots times seconds of steps, by kind of slot.", {"kind": SLOT_KINDS}),
}
"""Name -> help, and the values of each label. All of them have a sample from the start, as Prometheus recommends."""


class PrometheusMetrics(ReplayReader, Collector):
    """Counts what a tracker replays, and exports the counts.

    Args:
        tracker: the tracker of the engine, which notifies these metrics.
        gauges, counters: additional metrics: name -> (help, function that returns the value).
        model_name: the value of the label `model_name`; None is the name of the model in its events.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        gauges: dict[str, tuple[str, Callable[[], float]]] | None = None,
        model_name: str | None = None,
        counters: dict[str, tuple[str, Callable[[], float]]] | None = None,
    ) -> None:
        self._tracker = tracker
        self._model_name = model_name
        self._gauges, self._other_counters = gauges or {}, counters or {}
        self._histograms = {name: BucketCounts(buckets) for name, (_, buckets) in HISTOGRAMS.items()}
        self._counters: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
        self._groups: dict[str, tuple[int, int]] = {}  # of unfinished answers: the longest one, and how many have ended
        tracker.add_reader(self)

    # -- events --------------------------------------------------------------------------------------------------

    def _count(self, name: str, amount: float = 1, *labels: str) -> None:
        self._counters[name][labels] += amount  # type: ignore[assignment]

    def on_start(self) -> None:
        self._groups.clear()

    def on_step(self, step: Step, rows: Rows) -> None:
        self._count("chairlift:steps")
        self._count("vllm:num_preemptions", len(step.preempted))
        self._count("chairlift:swaps", len(step.swapped))
        self._count("chairlift:swapped_blocks", step.blocks_swapped_in, "in")
        self._count("chairlift:swapped_blocks", step.blocks_swapped_out, "out")
        self._count("vllm:generation_tokens", sum(step.num_new))
        self._count("chairlift:recomputed_tokens", step.num_recomputed)
        self._count("chairlift:padding_tokens", sum(step.num_padding))
        if step.num_draft:
            self._count("vllm:spec_decode_num_drafts", sum(map(bool, step.num_draft)))
            self._count("vllm:spec_decode_num_draft_tokens", sum(step.num_draft))
            self._count("vllm:spec_decode_num_accepted_tokens", step.num_accepted)
            for num_draft, num_new in zip(step.num_draft, step.num_new, strict=True):
                for position in range(num_new - 1 if num_draft else 0):
                    self._count("vllm:spec_decode_num_accepted_tokens_per_pos", 1, str(position))
        self._count("chairlift:state_checkpoint_evictions", step.evicted_checkpoints)
        seconds = step.time - step.scheduled_time
        for kind in SLOT_KINDS:
            self._count("chairlift:kv_slot_seconds", seconds * getattr(step, kind), kind)
        self._histograms["vllm:iteration_tokens_total"].add(sum(step.num_scheduled) + sum(step.num_padding))
        self._count_admitted_prompts(step)
        if not self._tracker.is_static:
            self._record_tokens(step, rows)

    def _count_admitted_prompts(self, step: Step) -> None:
        """Count the prompt tokens of the requests that were admitted for the first time."""
        started = self._tracker.started
        has_cache = started is not None and started.enable_prefix_caching
        for request_id in step.admitted:
            request = self._tracker.get(request_id)
            if request is None or request.first_scheduled != step.scheduled_time:
                continue
            self._count("vllm:prompt_tokens", request.arrived.num_prompt_tokens)
            self._count("vllm:prompt_tokens_cached", request.num_cached_tokens)
            if has_cache:
                self._count("vllm:prefix_cache_queries", request.arrived.num_prompt_tokens)
                self._count("vllm:prefix_cache_hits", request.num_cached_tokens)
            if request.prefix is not None:
                known = request.prefix.for_caller()  # Metrics can be read without a key.
                self._count("chairlift:prefix_cache_disk_tokens", known.num_disk_tokens)
                if known.reason is not None:
                    num_missed = request.arrived.num_prompt_tokens - request.num_cached_tokens
                    self._count("chairlift:prefix_cache_missed_tokens", num_missed, known.reason)

    def _record_tokens(self, step: Step, rows: Rows) -> None:
        """Record the latency of returned tokens. Equal gaps are counted first: most rows of a step share one."""
        gaps: Counter[float] = Counter()
        for request, index in rows:
            if not step.num_new[index] or request.last_token != step.time:
                continue
            gap = request.token_gap
            if gap is None:
                self._histograms["vllm:time_to_first_token_seconds"].add(step.time - request.arrived.time)
            else:
                gaps[gap] += 1
        for gap, count in gaps.items():
            self._histograms["vllm:inter_token_latency_seconds"].add(gap, count)

    def on_end(self, request: TrackedRequest) -> None:
        if request.state == "rejected":
            self._count("chairlift:requests_rejected")
        elif request.finished is not None:
            self._finish(request, request.finished)

    def _finish(self, request: TrackedRequest, event: RequestFinished) -> None:
        self._count("vllm:request_success", 1, event.finish_reason)
        for reason, steps in event.steps_waited.items():
            self._count("chairlift:wait_steps", steps, reason)
        self._count_waits(request)
        if (predicted := request.arrived.predicted_len) is not None and event.finish_reason in ("stop", "length"):
            self._count("chairlift:length_predictions")
            self._count("chairlift:length_error_tokens", abs(predicted - event.num_output_tokens))
            self._count("chairlift:length_predictions_covered", event.num_output_tokens <= predicted)
        if (met := request.met_slo) is not None:
            self._count("chairlift:slo_requests", 1, "met" if met else "missed")
        add = self._histograms
        add["vllm:request_prompt_tokens"].add(event.num_prompt_tokens)
        add["vllm:request_generation_tokens"].add(event.num_output_tokens)
        add["vllm:request_num_preemptions"].add(event.num_preemptions)
        add["vllm:request_params_max_tokens"].add(request.arrived.max_tokens)
        add["vllm:request_prefill_kv_computed_tokens"].add(event.num_prompt_tokens - event.num_cached_tokens)
        self._finish_group(request, event.num_output_tokens)
        add["vllm:e2e_request_latency_seconds"].add(event.time - event.arrival_time)
        scheduled, first = event.first_scheduled_time, event.first_token_time
        if scheduled is None:
            return
        add["vllm:request_queue_time_seconds"].add(scheduled - event.arrival_time)
        add["vllm:request_inference_time_seconds"].add(event.time - scheduled)
        if first is None:
            return
        add["vllm:request_prefill_time_seconds"].add(first - scheduled)
        add["vllm:request_decode_time_seconds"].add(event.time - first)
        if self._tracker.is_static:
            add["vllm:time_to_first_token_seconds"].add(first - event.arrival_time)
        elif (tpot := request.tpot) is not None:
            add["vllm:request_time_per_output_token_seconds"].add(tpot)

    def _finish_group(self, request: TrackedRequest, num_output_tokens: int) -> None:
        """Count what concerns all answers to one prompt, when the last of them has ended."""
        leader_id = request.arrived.leader_id or request.request_id
        longest, num_ended = self._groups.pop(leader_id, (0, 0))
        longest, num_ended = max(longest, num_output_tokens), num_ended + 1
        leader = self._tracker.get(leader_id)
        if leader is not None and num_ended <= leader.num_siblings:
            self._groups[leader_id] = longest, num_ended
            return
        self._histograms["vllm:request_max_num_generation_tokens"].add(longest)
        self._histograms["vllm:request_params_n"].add(num_ended)

    def _count_waits(self, request: TrackedRequest) -> None:
        for index, spans in enumerate(self._tracker.spans(request)):
            for span in spans:
                self._count("chairlift:wait_seconds", span.end - span.start, span.reason)
                if index:
                    self._count("chairlift:preempted_seconds", span.end - span.start)

    # -- exposition ----------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        started = self._tracker.started
        name = "" if started is None else started.model
        labels = {"model_name": name if self._model_name is None else self._model_name, "engine": "0"}
        yield from self._gauge_families(labels)
        for name, (text, value_of) in self._other_counters.items():
            other = CounterMetricFamily(name, text, labels=list(labels))
            other.add_metric(list(labels.values()), value_of())
            yield other
        for name, (text, names) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=[*labels, *names])
            for key, value in {**dict.fromkeys(product(*names.values()), 0.0), **self._counters[name]}.items():
                counter.add_metric([*labels.values(), *key], float(value))
            yield counter
        for name, (text, _) in HISTOGRAMS.items():
            buckets, total = self._histograms[name].points()
            histogram = HistogramMetricFamily(name, text, labels=list(labels))
            histogram.add_metric(list(labels.values()), buckets, total)
            yield histogram

    def _gauge_families(self, labels: dict[str, str]) -> Iterable[Metric]:
        started, state = self._tracker.started, self._tracker.counts()
        held = (
            0.0 if started is None or not started.num_blocks else self._tracker.num_held_blocks() / started.num_blocks
        )
        values: dict[str, tuple[str, float]] = {
            "vllm:num_requests_running": ("Number of running requests.", state["running"]),
            "vllm:num_requests_waiting": ("Number of waiting requests.", state["waiting"]),
            "vllm:kv_cache_usage_perc": ("Share of the KV blocks that requests hold, from 0 to 1.", held),
            **{name: (text, value()) for name, (text, value) in self._gauges.items()},
        }
        if started is not None and started.state_bytes:
            values |= _state_values(started, self._tracker.last_step, state["running"])
        if started is not None and started.num_swap_blocks:
            last = self._tracker.last_step
            used = 0 if last is None else last.swap_blocks / started.num_swap_blocks
            values["chairlift:swap_space_usage_perc"] = ("Share of the swap space in use, from 0 to 1.", used)
        for name, (text, number) in values.items():
            yield _gauge(name, text, labels, number)
        yield self._waiting_by_reason(labels)
        kinds = GaugeMetricFamily("chairlift:kv_slots", "KV slots by kind.", labels=[*labels, "kind"])
        for kind, count in self._tracker.slots().items():
            kinds.add_metric([*labels.values(), kind], float(count))
        yield kinds
        if started is not None:
            yield _cache_config(started)

    def _waiting_by_reason(self, labels: dict[str, str]) -> Metric:
        """As in vLLM: requests in the queue, and those that wait for the prompt of a sibling."""
        num_queued, num_waiting = len(self._tracker.waiting()), self._tracker.counts()["waiting"]
        family = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Number of waiting requests by reason.", labels=[*labels, "reason"]
        )
        for reason, count in (("capacity", num_queued), ("deferred", num_waiting - num_queued)):
            family.add_metric([*labels.values(), reason], float(count))
        return family


def _state_values(started: EngineStarted, step: Step | None, running: float) -> dict[str, tuple[str, float]]:
    used = 0 if step is None else step.num_checkpoints
    return {
        "chairlift:state_bytes": ("Bytes of the recurrent states of running requests.", running * started.state_bytes),
        "chairlift:state_checkpoints": ("Checkpoints of recurrent states in use.", used),
        "chairlift:state_checkpoint_slots": ("Checkpoints that there is memory for.", started.num_checkpoints),
    }


def _cache_config(started: EngineStarted) -> Metric:
    labels = {
        "engine": "0",
        "block_size": str(started.block_size),
        "num_gpu_blocks": str(started.num_blocks),
        "enable_prefix_caching": str(started.enable_prefix_caching),
        "cache_dtype": started.kv_cache_dtype,
        "kv": started.kv,
        "batching": started.batching,
    }
    return _gauge("vllm:cache_config_info", "Configuration of the KV pool.", labels, 1)


def _gauge(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    gauge = GaugeMetricFamily(name, text, labels=list(labels))
    gauge.add_metric(list(labels.values()), float(value))
    return gauge
