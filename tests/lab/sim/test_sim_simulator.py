"""Simulated runs of small workloads."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from sim_workloads import ConstantCost, configs, request, simulated, small_config, workloads

from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.errors import ConfigError
from chairlift.events import EngineStarted, EventList, RequestArrived, RequestFinished, RequestRejected, Step
from chairlift.lab.metrics.run import RunTally, summarize
from chairlift.lab.sim.model_shape import model_shape
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.request_feed import RequestFeed


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


def test_empty_workload() -> None:
    assert simulate([], small_config(), ConstantCost()).num_steps == 0


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


def test_too_small_a_pool_is_rejected() -> None:
    with pytest.raises(ConfigError, match="reserves max_model_len=64"):
        simulate([], SimConfig(SchedulerConfig(64), KVPool(3, 16, 64, "max")), ConstantCost())


def test_simulation_loads_no_torch() -> None:
    names = ("sim.simulator", "sim.roofline", "sim.fitted_cost_model", "presets")
    modules = ", ".join(f"chairlift.lab.{name}" for name in names)
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
