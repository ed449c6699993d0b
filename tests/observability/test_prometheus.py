"""Compares metrics in Prometheus's text format with the events."""

from __future__ import annotations

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from chairlift.core.kv.state_checkpoints import CheckpointPlan
from chairlift.events import SLOT_KINDS, EventList, RequestFinished, Step
from chairlift.lab.metrics.requests import request_metrics
from chairlift.observability.prometheus import COUNTERS, HISTOGRAMS, PrometheusMetrics
from chairlift.observability.tracker import RequestTracker
from chairlift.slo import SLO
from support.fakes import PartlyRightProposals
from support.tracked_engine import TrackedEngine


def busy_engine(**options: object) -> TrackedEngine:
    engine = TrackedEngine(**{"num_blocks": 8, "block_size": 2, "max_num_seqs": 3, **options})
    for index in range(6):
        engine.add([1, 2, 3, index % 2, *range(index % 3)], 6, late=0.01)
        engine.steps(1)
    engine.core.abort("r6")
    engine.to_end()
    return engine


def exposed(events: EventList, engine: TrackedEngine) -> dict[tuple[str, str], float]:
    """(sample, its last label's value if that is its own) -> value."""
    tracker = RequestTracker()
    metrics = PrometheusMetrics(tracker, {"chairlift:engine_up": ("Whether it runs.", lambda: 1.0)})
    assert engine.tracker.started is not None
    for event in (engine.tracker.started, *events.events):
        tracker.emit(event)
    registry = CollectorRegistry()
    registry.register(metrics)
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            own = [v for k, v in sample.labels.items() if k not in ("model_name", "engine")]
            found[sample.name, own[-1] if own else ""] = sample.value
    return found


def test_every_counter_has_a_sample_for_each_label_before_the_first_event() -> None:
    found = exposed(EventList(), TrackedEngine())
    for name, (_help, labels) in COUNTERS.items():
        for value in next(iter(labels.values()), ("",)):
            assert found[f"{name}_total", value] == 0
    ended = {value for name, value in found if name == "vllm:request_success_total"}
    assert ended == {"stop", "length", "abort", "error", "timeout"}


def test_missed_tokens_are_counted_by_the_reason_that_anybody_may_know() -> None:
    engine = TrackedEngine(max_num_seqs=1)
    text = list(range(100, 140))
    for prompt, salt in (([1, *text], "a"), ([1, *text], "a"), ([2, *text], "a"), ([1, *text], "b")):
        engine.add(prompt, 2, cache_salt=salt)
    engine.to_end()
    found = exposed(engine.log, engine)
    missed = {reason: n for (name, reason), n in found.items() if name == "chairlift:prefix_cache_missed_tokens_total"}
    assert {reason: count for reason, count in missed.items() if count} == {"never_seen": 82, "differs": 41}
    assert "other_salt" not in missed


def test_draft_tokens_are_counted() -> None:
    engine = busy_engine(block_size=8, propose=PartlyRightProposals(1, 0.6))
    found = exposed(engine.log, engine)
    steps = [event for event in engine.log.events if isinstance(event, Step) and event.num_draft]
    drafts, accepted = sum(sum(step.num_draft) for step in steps), sum(step.num_accepted for step in steps)
    assert found["vllm:spec_decode_num_drafts_total", ""] == sum(sum(map(bool, step.num_draft)) for step in steps) > 0
    assert found["vllm:spec_decode_num_draft_tokens_total", ""] == drafts
    assert found["vllm:spec_decode_num_accepted_tokens_total", ""] == accepted
    assert 0 < accepted < drafts
    by_position = {
        k: v for (name, k), v in found.items() if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    }
    assert sum(by_position.values()) == accepted
    assert by_position["0"] == max(by_position.values())


def test_errors_of_predicted_lengths_are_counted() -> None:
    engine = TrackedEngine(length_predictor="max_tokens")
    for max_tokens, output_len in ((9, 4), (6, 6), (30, None)):
        engine.add([1, 2], max_tokens, output_len=output_len)
    engine.steps(2)
    engine.core.abort("r3")
    engine.to_end()
    found = exposed(engine.log, engine)
    names = ("length_predictions", "length_error_tokens", "length_predictions_covered")
    assert [found[f"chairlift:{name}_total", ""] for name in names] == [2, 5, 2]


def test_counters_are_sums_over_the_events() -> None:
    engine = busy_engine()
    found = exposed(engine.log, engine)
    steps = [event for event in engine.log.events if isinstance(event, Step)]
    ended = [event for event in engine.log.events if isinstance(event, RequestFinished)]
    assert found["chairlift:steps_total", ""] == len(steps)
    assert found["vllm:num_preemptions_total", ""] == sum(len(step.preempted) for step in steps) > 0
    assert found["vllm:generation_tokens_total", ""] == sum(sum(step.num_new) for step in steps)
    assert found["chairlift:recomputed_tokens_total", ""] == sum(event.num_recomputed_tokens for event in ended)
    assert found["vllm:prefix_cache_hits_total", ""] == sum(event.num_cached_tokens for event in ended) > 0
    assert found["vllm:prompt_tokens_cached_total", ""] == found["vllm:prefix_cache_hits_total", ""]
    assert found["vllm:request_num_preemptions_sum", ""] == found["vllm:num_preemptions_total", ""]
    assert found["vllm:request_params_max_tokens_sum", ""] == 6 * 6
    assert found["vllm:request_success_total", "length"] == 5
    assert found["vllm:request_success_total", "abort"] == 1
    waited: Counter[str] = Counter()
    for event in ended:
        waited.update(event.steps_waited)
    assert Counter({k: v for (name, k), v in found.items() if name == "chairlift:wait_steps_total"}) == waited
    for kind in SLOT_KINDS:
        seconds = sum((step.time - step.scheduled_time) * getattr(step, kind) for step in steps)
        assert found["chairlift:kv_slot_seconds_total", kind] == pytest.approx(seconds)


def test_latencies_are_those_of_the_request_metrics() -> None:
    engine = busy_engine()
    found = exposed(engine.log, engine)
    requests = request_metrics(engine.log.events)
    itls = [gap for request in requests for gap in request.itls]
    ttfts = [request.ttft for request in requests if request.ttft is not None]
    assert found["vllm:inter_token_latency_seconds_sum", ""] == pytest.approx(sum(itls))
    assert found["vllm:inter_token_latency_seconds_count", ""] == len(itls)
    assert found["vllm:time_to_first_token_seconds_sum", ""] == pytest.approx(sum(ttfts))
    assert found["vllm:time_to_first_token_seconds_count", ""] == len(ttfts)
    assert found["vllm:inter_token_latency_seconds_bucket", "0.15"] == sum(gap <= 0.15 for gap in itls)


def test_waits_in_seconds_are_the_queue_times_and_those_after_preemptions() -> None:
    engine = busy_engine()
    found = exposed(engine.log, engine)
    total = sum(value for (name, _), value in found.items() if name == "chairlift:wait_seconds_total")
    waits = [w for r in engine.tracker.requests() for w in r.waits]
    assert total == pytest.approx(sum(w.end - w.start for w in waits if w.end is not None))
    again = [w for r in engine.tracker.requests() for w in r.waits[1:]]
    after = sum(w.end - w.start for w in again if w.end is not None)
    assert found["chairlift:preempted_seconds_total", ""] == pytest.approx(after)
    assert after > 0


def test_prompts_are_counted_once_if_a_preemption_was_dropped() -> None:
    engine = busy_engine()
    dropped = [event for event in engine.log.events if isinstance(event, Step) and event.preempted]
    assert not any(event.admitted for event in dropped)
    kept = EventList([event for event in engine.log.events if event not in dropped])
    sample = ("vllm:prompt_tokens_total", "")
    assert exposed(kept, engine)[sample] == exposed(engine.log, engine)[sample] > 0


def test_gauges_show_the_current_state() -> None:
    engine = TrackedEngine(max_num_seqs=2, num_blocks=10)
    for start in range(4):
        engine.add([start, 5, 6], 9)
    engine.steps(2)
    found = exposed(engine.log, engine)
    assert (found["vllm:num_requests_running", ""], found["vllm:num_requests_waiting", ""]) == (2, 2)
    assert found["vllm:kv_cache_usage_perc", ""] == pytest.approx(0.2)
    assert found["chairlift:engine_up", ""] == 1
    assert sum(value for (name, _), value in found.items() if name == "chairlift:kv_slots") == 40
    assert found["chairlift:kv_slots", "free"] < 40
    engine.to_end()
    found = exposed(engine.log, engine)
    assert found["vllm:kv_cache_usage_perc", ""] == 0
    assert found["chairlift:kv_slots", "free"] == 40


def test_answers_to_one_prompt_are_one_call_and_wait_for_its_prompt() -> None:
    engine = TrackedEngine(max_num_seqs=2, num_blocks=40)
    for leader, max_tokens in ((None, 4), ("r1", 9), ("r1", 2), (None, 4)):
        engine.add([1, 2, 3], max_tokens, leader_id=leader)
    found = exposed(engine.log, engine)
    waiting = "vllm:num_requests_waiting_by_reason"
    assert (found[waiting, "capacity"], found[waiting, "deferred"]) == (2, 2)
    engine.to_end()
    found = exposed(engine.log, engine)
    assert (found["vllm:request_params_n_sum", ""], found["vllm:request_params_n_count", ""]) == (4, 2)
    assert found["vllm:request_max_num_generation_tokens_sum", ""] == 9 + 4
    computed, cached = (
        found["vllm:request_prefill_kv_computed_tokens_sum", ""],
        found["vllm:prompt_tokens_cached_total", ""],
    )
    assert computed + cached == 4 * 3
    assert (found[waiting, "capacity"], found[waiting, "deferred"]) == (0, 0)


def test_a_static_batch_has_first_tokens_and_no_gaps() -> None:
    engine = busy_engine(batching="static", num_blocks=32)
    found = exposed(engine.log, engine)
    assert found["vllm:inter_token_latency_seconds_count", ""] == 0
    assert found["vllm:time_to_first_token_seconds_count", ""] == 5
    assert found["chairlift:padding_tokens_total", ""] > 0


def test_every_metric_is_exported_before_the_first_event() -> None:
    engine = TrackedEngine()
    names = {name for name, _ in exposed(EventList(), engine)}
    assert {f"{name}_sum" for name in HISTOGRAMS} <= names
    assert {f"{name}_total" for name, (_, labels) in COUNTERS.items() if not labels} <= names


def test_recurrent_states_have_gauges_of_their_own_and_evictions_are_counted() -> None:
    engine = TrackedEngine(num_blocks=40, block_size=2, max_num_seqs=2, checkpoints=CheckpointPlan(4, 8))
    for start in range(6):
        engine.add([start, *range(20)], 9)
    engine.steps(8)
    found = exposed(engine.log, engine)
    steps = [event for event in engine.log.events if isinstance(event, Step)]
    assert found["chairlift:state_bytes", ""] == 1000 * found["vllm:num_requests_running", ""] > 0
    assert found["chairlift:state_checkpoints", ""] == steps[-1].num_checkpoints > 0
    assert found["chairlift:state_checkpoint_slots", ""] == 4
    engine.to_end()
    evicted = exposed(engine.log, engine)["chairlift:state_checkpoint_evictions_total", ""]
    assert evicted == engine.manager.counts().num_evicted_checkpoints > 0


def test_requests_with_an_slo_are_counted_by_its_result() -> None:
    engine = TrackedEngine()
    for slo in (SLO(9e6), SLO(9e6), SLO(ttft_ms=1), None):
        engine.add([1], 3, slo=slo)
    engine.to_end()
    found = exposed(engine.log, engine)
    assert found["chairlift:slo_requests_total", "met"] == 2
    assert found["chairlift:slo_requests_total", "missed"] == 1
