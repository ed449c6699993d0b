"""The steady state of presets of KV memory, siblings that share a prompt, and the requests of the data sets."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from preset_studies import systems

from chairlift.events import SLOT_KINDS, EventBroadcaster, EventList, Step
from chairlift.lab.presets.measures import WARM_UP_SHARE, SteadyStateTally, simulate_outputs
from chairlift.lab.presets.study import StudySystem, at_rate
from chairlift.lab.report.recorded_run import steps_with_true_kinds, trace_events
from chairlift.lab.sim.simulator import simulate
from chairlift.lab.workload.request import WorkloadRequest


def test_requests_are_the_same_at_every_rate() -> None:
    system = systems("vllm-fig2", 0, 50)["vLLM = paged"]
    requests = system.requests(1)
    slow, fast, burst = at_rate(requests, 2.0), at_rate(requests, 8.0), at_rate(requests, math.inf)
    assert [r.arrival / 4 for r in slow] == pytest.approx([r.arrival for r in fast])
    assert {r.arrival for r in burst} == {0.0}
    assert [(r.request_id, r.prompt_token_ids) for r in fast] == [(r.request_id, r.prompt_token_ids) for r in requests]
    assert all(len(r.prompt_token_ids) + r.output_len <= 2048 for r in requests)
    assert system.requests(1) == requests


@pytest.mark.parametrize("name", ["Orca (Max) = max", "Orca (Pow2) = pow2", "Orca (Oracle) = oracle", "vLLM = paged"])
def test_steady_state_equals_the_report_with_true_lengths(name: str) -> None:
    """Finds the counted steps in the events, and computes their slots with `report.recorded_run`."""
    system = systems("vllm-fig2", 0, 120)[name]
    events, tally = EventList(), SteadyStateTally(120)
    sinks = EventBroadcaster(events, tally)
    simulate(at_rate(system.requests(2), math.inf), system.config, system.cost_model, sinks)
    steps = [event for event in events.events if isinstance(event, Step)]
    seen: set[str] = set()
    counted = []
    for index, step in enumerate(steps):
        seen |= set(step.admitted)
        if WARM_UP_SHARE * 120 <= len(seen) < 120:
            counted.append(index)
            assert step.num_waiting > 0, "the queue is not empty"
    true_steps = steps_with_true_kinds(trace_events(events.events))
    sums = {kind: sum(getattr(true_steps[index], kind) for index in counted) for kind in SLOT_KINDS}
    shares = {kind: 100 * slots / sum(sums.values()) for kind, slots in sums.items()}
    shares["external"] += shares.pop("free")
    for kind, share in shares.items():
        assert tally.value(kind) == pytest.approx(share), kind
    assert tally.value("batch") == pytest.approx(sum(steps[i].num_running for i in counted) / len(counted))
    assert tally.value("saved") == 0


def with_outputs(count: int) -> StudySystem:
    """A system with several outputs for each prompt."""
    system = systems("vllm-fig2", 0, 5)["vLLM = paged"]
    return replace(system, workload={**system.workload, "num_outputs": count})


@pytest.mark.parametrize("count", [2, 4])
def test_siblings_share_the_full_blocks_of_their_prompt(count: int) -> None:
    """A prompt of 33 tokens has two full blocks, which all siblings except one save."""
    events, system = EventList(), with_outputs(count)
    simulate_outputs(system, [WorkloadRequest(f"r{i}", 0.0, bytes(33), 15) for i in range(5)], events)
    steps = [event for event in events.events if isinstance(event, Step)]
    assert steps[0].saved == 0, "the leaders compute their prompts first"
    assert max(step.saved for step in steps) == 5 * (count - 1) * 32
    assert sum(sum(step.num_new) for step in steps) == 5 * count * 15


def test_a_prompt_of_one_block_is_not_shared() -> None:
    events, system = EventList(), with_outputs(2)
    simulate_outputs(system, [WorkloadRequest(f"r{i}", float(i), bytes(16), 20) for i in range(5)], events)
    assert {event.saved for event in events.events if isinstance(event, Step)} == {0}
