"""Simulated runs of small workloads, the time of block copies, and disaggregated prefill and decode."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from sim_workloads import ConstantCost, configs, request, simulated, small_config, workloads

from chairlift.clock import VirtualClock
from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.errors import ConfigError
from chairlift.events import EngineStarted, EventList, RequestArrived, RequestFinished, RequestRejected, Step
from chairlift.lab.metrics.requests import RequestMetrics
from chairlift.lab.metrics.run import RunTally, summarize
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.devices import DEVICES
from chairlift.lab.sim.disaggregation import Instances
from chairlift.lab.sim.executor import SimExecutor
from chairlift.lab.sim.model_shape import model_shape
from chairlift.lab.sim.roofline import block_copy_seconds
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.request_feed import RequestFeed
from chairlift.outputs import SchedulerOutput


@settings(max_examples=100, deadline=None)
@given(workloads(), configs())
def test_every_request_has_its_forced_length_or_is_rejected(workload: list[WorkloadRequest], config: SimConfig) -> None:
    events, tally = EventList(), RunTally()
    result = simulate(workload, config, ConstantCost(), events)
    done = {event.request_id: event.num_output_tokens for event in simulated(events, RequestFinished)}
    rejected = {request_id for request_id, _ in result.rejected}
    assert done == {item.request_id: item.output_len for item in workload if item.request_id not in rejected}
    assert rejected == {event.request_id for event in simulated(events, RequestRejected)}
    steps = simulated(events, Step)
    assert (result.num_requests, result.num_steps) == (len(workload), len(steps))
    assert math.isclose(result.seconds, max([0.0, *(step.time for step in steps), *(i.arrival for i in workload)]))
    assert all(step.time - step.scheduled_time == pytest.approx(1.0) for step in steps)
    simulate(workload, config, ConstantCost(), tally)
    assert tally.result() == summarize(events.events), "a tally of the same run has equal metrics"


def test_clock_jumps_over_idle_time() -> None:
    events = EventList()
    result = simulate([request("a", 0.0, 3, 2), request("b", 1e6, 3, 1)], small_config(), ConstantCost(0.5), events)
    assert [(step.scheduled_time, step.time) for step in simulated(events, Step)] == [
        (0.0, 0.5),
        (0.5, 1.0),
        (1e6, 1e6 + 0.5),
    ]
    assert (result.seconds, result.num_steps) == (1e6 + 0.5, 3)
    assert result.steps_per_wall_second > 0


def test_arrival_during_a_step_has_its_due_time() -> None:
    events = EventList()
    simulate([request("a", 0.0, 3, 3), request("b", 0.25, 3, 1)], small_config(), ConstantCost(), events)
    assert [event.time for event in simulated(events, RequestArrived)] == [0.0, 0.25]
    metrics = summarize(events.events)
    assert metrics.ttft is not None
    assert metrics.ttft.max == 1.75, "it waits for the running step and for its own"


def test_closed_loop() -> None:
    """Two seats and four requests of three steps each, all with arrival time 0."""
    events = EventList()
    feed = RequestFeed([request(f"r{i}", 0.0, 2, 3) for i in range(4)], max_concurrency=2)
    result = simulate(feed, small_config(), ConstantCost(), events)
    assert [event.time for event in simulated(events, RequestArrived)] == [0.0, 0.0, 3.0, 3.0]
    assert result.seconds == 6.0


def test_outputs_share_blocks_only_after_equal_prompts() -> None:
    """All outputs are zeros; the prompts differ in their first token or are equal."""
    for first, cached in ((1, 0), (0, 4)):
        events = EventList()
        pair = [request("a", 0.0, 5, 9), request("b", 50.0, 5, 9, first=first)]
        simulate(pair, small_config(), ConstantCost(), events)
        assert [event.num_cached_tokens for event in simulated(events, RequestFinished)] == [0, cached]


def test_request_that_can_never_fit_is_rejected_and_blocks_no_other() -> None:
    events = EventList()
    workload = [request("big", 0.0, 60, 30), request("next", 0.0, 1, 1), request("small", 0.0, 3, 2)]
    result = simulate(RequestFeed(workload, max_concurrency=1), small_config(), ConstantCost(), events)
    assert [request_id for request_id, _ in result.rejected] == ["big"]
    assert "max_model_len=64" in result.rejected[0][1]
    assert {event.request_id for event in simulated(events, RequestFinished)} == {"next", "small"}


def test_empty_workloads_and_pools_that_are_too_small() -> None:
    assert simulate([], small_config(), ConstantCost()).num_steps == 0
    with pytest.raises(ConfigError, match="reserves max_model_len=64"):
        simulate([], SimConfig(SchedulerConfig(64), KVPool(3, 16, 64, "max")), ConstantCost())


def test_first_event_describes_the_engine() -> None:
    model = model_shape("opt-13b")
    scheduler = SchedulerConfig(2048, batching="static", static_batch_size=4)
    events = EventList()
    pool = KVPool(300, 16, 2048, "max", "first-fit")
    simulate([], SimConfig(scheduler, pool, model=model), ConstantCost(), events)
    (started,) = events.events
    assert isinstance(started, EngineStarted)
    assert (started.model, started.kv_bytes_per_slot, started.weight_bytes) == ("opt-13b", 819_200, model.weight_bytes)
    assert (started.batching, started.static_batch_size, started.static_run_to) == ("static", 4, "batch")
    assert (started.kv, started.kv_arena, started.enable_prefix_caching) == ("max", "first-fit", False)
    continuous = small_config().engine_started()
    assert (continuous.static_batch_size, continuous.kv_arena, continuous.enable_prefix_caching) == (None, None, True)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (KVPool(16, 4, 64, "fast"), "kv must be one of"),
        (KVPool(16, 4, 64, "max"), "enable_prefix_caching needs kv=paged"),
        (KVPool(16, 4, 64, kv_arena="first-fit"), "needs a reservation policy"),
        (KVPool(0, 4, 64), "num_kv_blocks must be at least 1"),
        (KVPool(16, 0, 64), "block_size must be at least 1"),
        (KVPool(16, 4, 65), "pool.max_model_len=65 must equal scheduler.max_model_len=64"),
    ],
)
def test_invalid_configurations_are_rejected(pool: KVPool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SimConfig(SchedulerConfig(64), pool, enable_prefix_caching=True)


def test_a_block_takes_its_bytes_over_the_bandwidth_and_a_latency_for_each_copy() -> None:
    seconds = block_copy_seconds(16, model_shape("opt-13b"), DEVICES["A100-40GB"])
    assert seconds == pytest.approx(16 * 819_200 / (32e9 * 0.8) + 80 * 5e-6)


def test_a_step_that_swaps_takes_longer() -> None:
    clock = VirtualClock()
    executor = SimExecutor(ConstantCost(), clock, block_copy_seconds=0.25)
    executor.result(executor.submit(SchedulerOutput(0, {})))
    alone = clock.now()
    executor.result(executor.submit(SchedulerOutput(1, {}, swapped_out={0: 3, 1: 4}, swapped_in={5: 0})))
    assert clock.now() - 2 * alone == pytest.approx(0.75)


CONFIG = SimConfig(SchedulerConfig(64, 4, 64), KVPool(64, 4, 64), enable_prefix_caching=False)


class TokenCost:
    """A step takes a second for each token."""

    def seconds(self, shape: StepShape) -> float:
        return float(shape.num_tokens)


def requests(*arrivals: float, output_len: int = 3) -> list[WorkloadRequest]:
    return [WorkloadRequest(f"r{i}", time, [i] * 8, output_len) for i, time in enumerate(arrivals)]


def token_times(found: list[RequestMetrics]) -> dict[str, list[float]]:
    return {metrics.request_id: metrics.token_times for metrics in found}


def test_a_token_is_computed_once_and_its_k_and_v_are_transferred() -> None:
    """A prompt of 8 tokens takes 8 s, its transfer 4 s, and each further token 1 s."""
    found = Instances(1, 1, 0.5).simulate(requests(0.0), CONFIG, TokenCost())
    assert token_times(found) == {"r0": [8.0, 13.0, 14.0]}
    assert (found[0].ttft, found[0].tpot) == (8.0, 3.0)


def test_requests_take_the_instances_in_turn() -> None:
    """Two prefill instances compute two prompts at the same time, and one computes them together."""
    load = requests(0.0, 0.0)
    assert token_times(Instances(2, 1, 0.0).simulate(load, CONFIG, TokenCost())) == {
        "r0": [8.0, 10.0, 12.0],
        "r1": [8.0, 10.0, 12.0],
    }
    assert {metrics.ttft for metrics in Instances(1, 1, 0.0).simulate(load, CONFIG, TokenCost())} == {16.0}


def test_a_stage_alone() -> None:
    prefill = Instances(1, 0, 0.5).simulate(requests(2.0), CONFIG, TokenCost())
    assert token_times(prefill) == {"r0": [10.0]}
    assert (prefill[0].ttft, prefill[0].tpot) == (8.0, None)
    decode = Instances(0, 1, 0.5).simulate(requests(2.0), CONFIG, TokenCost())
    assert token_times(decode) == {"r0": [2.0, 3.0, 4.0]}


def test_decodes_do_not_wait_for_prompts() -> None:
    """In one engine, the prompt of the second request delays the tokens of the first."""
    load = requests(0.0, 9.0, output_len=12)
    (first, _) = Instances(1, 1, 0.0).simulate(load, CONFIG, TokenCost())
    assert first.tpot is not None
    assert first.tpot < 2.0
    assert max(first.itls) == 2.0


def test_requests_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(AssertionError, match="max_model_len"):
        Instances(1, 0, 0.0).simulate([replace(requests(0.0)[0], prompt_token_ids=[0] * 80)], CONFIG, ConstantCost())
