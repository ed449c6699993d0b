"""Simulations of presets: hit rates, KV memory, preemption and the service of clients."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preset_studies import mean, run, systems

from chairlift.errors import ConfigError
from chairlift.events import SLOT_KINDS, EventBroadcaster, EventList, Step
from chairlift.lab.presets import find_preset
from chairlift.lab.presets.measures import WARM_UP_SHARE, SteadyStateTally, hit_rate, measure_memory, simulate_outputs
from chairlift.lab.presets.study import StudySystem, at_rate
from chairlift.lab.report.recorded_run import steps_with_true_kinds, trace_events
from chairlift.lab.sim.simulator import simulate
from chairlift.lab.workload.request import WorkloadRequest

PRESET = find_preset("mooncake-table-1")


def trace(path: Path, requests: list[list[int]]) -> Path:
    lines = [
        {"timestamp": 1000 * index, "input_length": 512 * len(ids), "output_length": 9, "hash_ids": ids}
        for index, ids in enumerate(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def names(*requests: list[int]) -> list[list[bytes]]:
    return [[number.to_bytes(8) for number in ids] for ids in requests]


def test_the_least_recently_used_blocks_are_evicted_from_the_end() -> None:
    """The pool of three keeps 1 of the first request, which the third one finds."""
    assert hit_rate(names([1, 2], [3, 4], [1, 2]), 3) == 1 / 6
    assert hit_rate(names([1, 2], [3, 4], [1, 2]), 4) == 2 / 6
    assert hit_rate(names([1, 2], [1, 3], [1, 2, 4]), 9) == 3 / 7


def test_a_request_larger_than_the_pool_stores_its_beginning() -> None:
    assert hit_rate(names([1, 2, 3], [1, 2, 3]), 2) == 2 / 6


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 6))
def test_requests_of_one_block_have_the_hits_of_an_lru(blocks: list[int], size: int) -> None:
    stored: list[int] = []
    num_hits = 0
    for block in blocks:
        num_hits += block in stored
        stored = [block, *(other for other in stored if other != block)][:size]
    assert hit_rate(names(*([block] for block in blocks)), size) == num_hits / len(blocks)


def test_the_preset_reads_the_trace_and_shows_the_published_rates(tmp_path: Path) -> None:
    path = trace(tmp_path / "trace.jsonl", [[0, 1, 2], [0, 1, 3], [0, 4], [9]])
    (result,) = PRESET.run(trace=path)
    assert mean(result, "all blocks, LRU", "hit_rate") == 3 / 9
    assert result.published("1,000 blocks, LRU", "hit_rate") == 0.3
    assert result.study.constants()[0][1] == f"at most 23,608 requests of {path}"
    (shorter,) = PRESET.run(trace=path, num_prompts=2)
    assert mean(shorter, "all blocks, LRU", "hit_rate") == 2 / 6


def test_a_trace_is_required_and_needs_hashes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="preset mooncake-table-1 needs a trace: give --trace FILE, the request"):
        PRESET.run()
    with pytest.raises(ConfigError, match=r"trace=.* does not apply; its options are: workload_seed, num_prompts"):
        find_preset("orca").run(trace=tmp_path)
    for requests, problem in (([], "the requests have no hash_ids"), ([[]], "no hash_ids"), ([[1, -1]], "got -1:")):
        with pytest.raises(ConfigError, match=problem):
            PRESET.run(trace=trace(tmp_path / "wrong.jsonl", requests))
    path = tmp_path / "other.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 1: .*hash_ids"):
        PRESET.run(trace=path)


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
    """Finds the counted steps in the events, and computes their slots with `report.memory`."""
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


def test_recomputation_is_faster_for_small_blocks_and_swapping_for_large_ones() -> None:
    """Kwon et al., SOSP'23, Figure 19."""
    result = run("vllm-fig19", 0, None)
    ratios = {int(label): mean(result, label, "swap_by_recompute") for label in result.rows}
    assert list(ratios) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert sorted(ratios.values(), reverse=True) == list(ratios.values())
    assert ratios[8] > 1 > ratios[128]


def test_beams_save_more_than_independent_outputs() -> None:
    """Kwon et al., SOSP'23, Figure 15: 37.6 % with 2 beams, 6.09 % with 2 outputs."""
    alone = systems("vllm-fig15", 0, 60)["Alpaca, 2 outputs"]
    beams = systems("vllm-fig15", 1, 60)["Alpaca, 2 beams"]
    saved = [measure_memory(each, 0, ["saved"])["saved"] for each in (alone, beams)]
    assert saved[0] < 15 < 30 < saved[1] < 45


FCFS, VTC = "FCFS = fcfs", "VTC = fair"


def test_clients_send_at_constant_rates() -> None:
    requests = systems("vtc-figure-3", 0, None)[VTC].requests(0)
    assert len(requests) == 2250
    for client, gap in (("client 1", 60 / 90), ("client 2", 60 / 180)):
        times = [request.arrival for request in requests if request.tenant == client]
        assert times == pytest.approx([index * gap for index in range(len(times))])
    assert 499 < requests[-1].arrival < 500


def test_service_differs_by_the_rates_without_fairness_and_within_the_bound_with_it() -> None:
    """250 requests in a minute: the second client receives twice the service of the first."""
    result = run("vtc-figure-3", 0, 250)
    gap = mean(result, FCFS, "service_gap")
    assert gap == mean(result, FCFS, "largest_service_gap") > 20_000
    assert mean(result, VTC, "largest_service_gap") <= 2 * max(1 * 256, 2 * 10_000)
    assert mean(result, VTC, "service_gap") < gap / 10
