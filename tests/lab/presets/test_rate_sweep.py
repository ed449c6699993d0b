"""Presets by rate and with all requests at once: Anyscale, Orca, Sarathi, and the search for the highest rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from preset_studies import mean, run, study, systems

from chairlift.lab.metrics.requests import RequestMetrics
from chairlift.lab.presets.measures import measure_memory
from chairlift.lab.presets.rate_sweep import completion_ratio, highest_rate, measure_run
from chairlift.lab.presets.study import num_kv_slots, token_by_token
from chairlift.lab.sim.cost_model import CostModel, StepShape
from chairlift.lab.sim.devices import DEVICES
from chairlift.lab.sim.model_shape import model_shape
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.request import WorkloadRequest

NAIVE, STATIC = "static, to the longest of all", "static, to the batch's longest"
MAX, PAGED = "continuous, max", "continuous, paged"
EXACT_QUOTA = "continuous, exact, max_tokens = length, in the quota"
ONE_PAGED = "vLLM = paged"
CAPS = (32, 128, 512, 1536)


@given(threshold=st.floats(0.01, 100), start=st.floats(0.2, 5), tolerance=st.floats(0.01, 0.5))
def test_highest_rate_is_found_within_the_tolerance(threshold: float, start: float, tolerance: float) -> None:
    tried: list[float] = []

    def is_met(rate: float) -> bool:
        tried.append(rate)
        return rate <= threshold

    rate = highest_rate(is_met, start, tolerance)
    assert rate in tried
    assert rate <= threshold < rate * (1 + tolerance) * (1 + 1e-9)
    assert len(tried) == len(set(tried)), "no rate is tried twice"


def test_unreachable_rates_are_zero_or_infinity() -> None:
    assert highest_rate(lambda rate: False, 1.0) == 0.0
    assert highest_rate(lambda rate: True, 1.0) == math.inf


def test_kv_slots_fill_the_memory_beside_the_weights() -> None:
    """90 % of two devices of 80 GB, less 67.9 GB of weights, in slots of 245,760 bytes."""
    model = model_shape("yi-34b")
    assert num_kv_slots(model, DEVICES["A100-80GB"], 2) == (144 * 10**9 - model.weight_bytes) // 245_760
    with pytest.raises(AssertionError, match="does not fit"):
        num_kv_slots(model_shape("gpt3-175b"), DEVICES["A100-40GB"], 8)


def test_every_request_must_fit() -> None:
    system = systems("anyscale", 0, 8)[f"<=32, {PAGED}"]
    with pytest.raises(AssertionError, match="max_model_len"):
        measure_run(system, [WorkloadRequest("long", 0.0, [0] * 2048, 4)], 1.0)


def test_disaggregation_sustains_more_per_instance_than_one_engine() -> None:
    result = run("distserve-figure-1", 0, 80, tolerance=0.2)
    both, prefill, decode, divided = (mean(result, label, "the SLOs") for label in result.rows)
    assert both < divided < prefill < decode
    assert 3 * divided < decode, "the decode instance receives the requests of all three"
    assert list(result.study.settings["published"]) == list(result.rows)


def test_a_short_trace_hides_an_overload() -> None:
    """Figure 14: three quarters more requests arrive than are finished, and their latency exceeds 0.2 s per token only
    if they arrive for long enough. So the preset also limits the requests that are left."""
    system = systems("vllm-fig14", 0, 1800, [ONE_PAGED])[f"basic, {ONE_PAGED}"]
    requests = system.requests(0)
    short, long = (measure_run(system, requests[:count], 110.0) for count in (400, 1800))
    latencies, ratios = (
        [each[name] for each in (short, long)] for name in ("normalized_latency_mean", "completion_ratio")
    )
    assert latencies[0] < 0.2 < latencies[1], (latencies, ratios)
    assert max(ratios) < 0.9, ratios
    assert system.limits["0.2 s per token"]["at_least"] == {"completion_ratio": 0.9}


@dataclass(frozen=True)
class HostCost:
    """A cost model with a cost of each sequence of a step."""

    base: CostModel
    seconds_per_sequence: float

    def seconds(self, shape: StepShape) -> float:
        return self.base.seconds(shape) + self.seconds_per_sequence * shape.num_seqs


def test_a_cost_of_each_running_request_lowers_the_ratio_of_short_requests() -> None:
    """Figure 14: the published ratio is 1.3."""
    ratios = []
    for seconds in (0.0, 0.34e-3):
        rates = []
        for name in ("Orca (Oracle) = oracle", ONE_PAGED):
            system = systems("vllm-fig14", 0, 500, [name])[f"basic, {name}"]
            vars(system)["cost_model"] = HostCost(system.cost_model, seconds)
            rates += measure_memory(system, 0, ["finished_per_s"]).values()
        ratios.append(rates[1] / rates[0])
    assert ratios[1] < 1.3 < ratios[0], ratios


def test_equal_steps_would_give_the_published_ratio_of_long_prompts() -> None:
    """Figure 17: the rates are as the running requests if every step takes equally long. In the roofline the further
    requests take time, for their K and V and their prompts."""
    result = run("vllm-fig17", 2, 60)
    rates, batches = (
        [result.ratio(f"{case}, Orca (Oracle) = oracle", measure) or 0.0 for case in result.study.settings["cases"]]
        for measure in ("finished_per_s", "batch")
    )
    assert rates[0] < 1.55 < rates[1], (rates, batches)
    assert batches[0] == batches[1] == pytest.approx(rates[1], rel=0.1), (rates, batches)


def test_throughput_of_static_and_continuous_batching() -> None:
    """Max has memory for 7 requests, fewer than the static batches of the shorter caps."""
    result = run("anyscale", 0, 24)
    rates = {label: mean(result, label, "total_tokens_per_s") for label in result.rows}
    for cap in CAPS:
        assert rates[f"<={cap}, {NAIVE}"] <= rates[f"<={cap}, {STATIC}"]
        for name in result.study.preset["systems"]:
            if name.startswith("continuous") and name != MAX:
                assert rates[f"<={cap}, {name}"] > rates[f"<={cap}, {STATIC}"], (name, cap)
        assert rates[f"<={cap}, {MAX}"] <= rates[f"<={cap}, {PAGED}"]
        declared = rates[f"<={cap}, continuous, exact, max_tokens = length"]
        assert declared == rates[f"<={cap}, continuous, oracle"], "it reserves as much"
        lens = [r.output_len for r in systems("anyscale", 0, 24)[f"<={cap}, {STATIC}"].requests(0)]
        size = {32: 16, 128: 12, 512: 8, 1536: 4}[cap]
        longest = [max(lens[start : start + size]) for start in range(0, 24, size)]
        steps = [mean(result, f"<={cap}, {name}", "num_steps") for name in (NAIVE, STATIC)]
        assert steps == [len(longest) * max(lens), sum(longest)]
    assert result.published(f"<=1536, {NAIVE}", "total_tokens_per_s") == 81
    published = [result.published(f"<={cap}, {PAGED}", "total_tokens_per_s") for cap in CAPS]
    assert published == [6121, 3592, 2029, 1898]
    assert result.published(f"<=1536, {PAGED}", "total_tokens_per_s ratio") == 23.4


def test_pool_has_the_published_size() -> None:
    found = systems("anyscale", 0, None)
    assert found[f"<=1536, {PAGED}"].config.pool.num_blocks * 16 == 15_728 == 12 * 2**30 // (800 * 2**10)
    assert found[f"<=1536, {EXACT_QUOTA}"].config.pool.num_blocks == 8100 // 16


@pytest.mark.parametrize(("name", "size"), [(MAX, 7), ("continuous, exact, max_tokens = cap", 7), (STATIC, 4)])
def test_peak_batches_at_the_largest_cap(name: str, size: int) -> None:
    """15,728 slots hold seven reservations of 512 + 1536, the same by max_model_len and by max_tokens."""
    system = systems("anyscale", 0, 32)[f"<=1536, {name}"]
    assert measure_run(system, system.requests(0), math.inf)["peak_batch_size"] == size


def test_latency_grows_with_the_rate_and_with_reservation() -> None:
    result = run("anyscale", 2, 32, rates=[1, 8], systems=[STATIC, MAX, PAGED])
    p50 = {label: mean(result, label, "e2e_latency_p50") for label in result.rows}
    assert p50[f"1/s, {PAGED}"] < p50[f"8/s, {PAGED}"] <= p50[f"8/s, {MAX}"] < p50[f"8/s, {STATIC}"]
    assert p50[f"1/s, {PAGED}"] <= p50[f"1/s, {MAX}"] < p50[f"1/s, {STATIC}"]
    assert result.published(f"1/s, {PAGED}", "e2e_latency_p50") == 3.6


ORCA, SINGLE, EIGHT = "Orca, 128 at most", "static, 1", "static, 8"
TOKEN_BY_TOKEN = "static, 8, prompts beyond the shortest token by token"


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=30), st.integers(1, 8))
def test_prompts_beyond_the_shortest_become_output_tokens(lens: list[tuple[int, int]], batch_size: int) -> None:
    before = [WorkloadRequest(f"r{i}", 0.0, list(range(p)), n) for i, (p, n) in enumerate(lens)]
    after = token_by_token(before, batch_size)
    assert [r.request_id for r in after] == [r.request_id for r in before]
    for old, new in zip(before, after, strict=True):
        assert len(new.prompt_token_ids) + new.output_len == len(old.prompt_token_ids) + old.output_len
        assert list(new.prompt_token_ids) == list(old.prompt_token_ids)[: len(new.prompt_token_ids)]
    for start in range(0, len(before), batch_size):
        shortest = min(len(r.prompt_token_ids) for r in before[start : start + batch_size])
        assert {len(r.prompt_token_ids) for r in after[start : start + batch_size]} == {shortest}


def test_throughput_with_a_full_queue() -> None:
    result = run("orca", 2, 32)
    rates = {label: mean(result, label, "requests_per_s") for label in result.rows}
    assert rates[ORCA] > rates[EIGHT] > rates[TOKEN_BY_TOKEN]
    assert rates[EIGHT] > rates[SINGLE]
    requests = systems("orca", 2, 200)[ORCA].requests(0)
    prompts, outputs = [len(r.prompt_token_ids) for r in requests], [r.output_len for r in requests]
    assert (min(prompts) >= 32, max(prompts) <= 512, min(outputs) >= 1, max(outputs) <= 128) == (True,) * 4
    assert all(r.max_output_len == r.output_len for r in requests), "Orca reserves what will be written"


def test_more_latency_allows_more_throughput() -> None:
    alone = {"times_alone": 2, "input_len": 128, "output_len": 32}
    limits = {
        name: {"at_most": {"normalized_latency_p50": limit}, "value": "requests_per_s"}
        for name, limit in {"low": alone, "high": {**alone, "times_alone": 8}, "none": 1e-6}.items()
    }
    result = run(
        "orca", 1, 12, tolerance=0.2, systems=[ORCA], limits=limits, ratio={"of": ORCA, "measures": []}, published={}
    )
    assert 0 < mean(result, ORCA, "low") <= mean(result, ORCA, "high")
    assert mean(result, ORCA, "none") == 0.0
    system = systems("orca", 1, None)[ORCA]
    seconds = measure_run(system, [WorkloadRequest("alone", 0.0, [0] * 128, 32)], math.inf)["normalized_latency_p50"]
    assert 0.02 < seconds < 0.190 / 2, "faster than the 95 ms of the paper's engine"


def test_orca_serves_more_than_static_batches_at_the_published_latency() -> None:
    result = run("orca", 1, 12, tolerance=0.3, systems=[ORCA, SINGLE])
    ratio = result.ratio(SINGLE, "190 ms per token")
    assert ratio is not None
    assert ratio > 1
    published = result.published(SINGLE, "190 ms per token ratio")
    assert published == pytest.approx(6.81 / 0.185, rel=0.01)


def test_lengths_have_the_published_quantiles() -> None:
    lens = parse_lengths("quantiles:100,1000,1200").sample(np.random.default_rng(0), 20_000)
    for limit, share in ((100, 0.5), (1000, 0.9)):
        assert sum(length <= limit for length in lens) / len(lens) == pytest.approx(share, abs=0.01)
    assert min(lens) >= 1
    assert max(lens) <= 1200
    for system in systems("sarathi", 0, 50).values():
        assert all(len(r.prompt_token_ids) + r.output_len <= system.config.scheduler.max_model_len
                   for r in system.requests(0))  # fmt: skip


def test_smaller_chunks_shorten_the_time_between_tokens() -> None:
    cases = {name: case for name, case in study("sarathi", 0, 24).settings["cases"].items() if "chat" in name}
    result = run("sarathi", 0, 24, cases=cases)
    (case,) = cases
    gaps = {name: mean(result, f"1/s, {case}, {name}", "itl_p99") for name in result.study.settings["systems"]}
    assert gaps["chunks of at most 512"] < gaps["chunks of at most 1024"] < gaps["whole prompts"]
    first = {name: mean(result, f"1/s, {case}, {name}", "ttft_p50") for name in gaps}
    assert first["whole prompts"] < first["chunks of at most 512"]
    published = [
        result.published(f"1/s, {case}, {name}", "itl_p99") for name in ("whole prompts", "chunks of at most 1024")
    ]
    assert published == [0.68, 0.14]


def test_a_strict_limit_allows_lower_rates_and_chunks_higher_ones() -> None:
    cases = study("sarathi", 1, 16).settings["cases"]
    shorter = {"workload": {"output_len": "uniform:1..60"}}
    chosen = {name: cases[name] | shorter for name in cases if name.startswith("mistral-7b, openchat")}
    result = run("sarathi", 1, 16, cases=chosen, tolerance=0.3)
    strict, relaxed = ([mean(result, f"{case}, {name}", "the limit") for name in ("whole prompts", "chunked")]
                       for case in chosen)  # fmt: skip
    assert strict[0] <= relaxed[0], "a strict limit implies the relaxed one"
    assert 0 < strict[0] <= strict[1]
    ratio = result.ratio(f"{next(iter(chosen))}, chunked", "the limit")
    assert ratio == pytest.approx(strict[1] / strict[0])


def finished(arrival: float, end: float) -> RequestMetrics:
    return RequestMetrics(f"r{arrival}-{end}", 1, 0, "length", arrival, arrival, [end])


def test_completion_ratio() -> None:
    steady = [finished(float(i), i + 0.5) for i in range(10)]
    assert completion_ratio(steady) == 1.0
    assert completion_ratio([finished(float(i), 100.0) for i in range(10)]) == 0.0
    assert completion_ratio([finished(float(i), 1.5 * i + 0.1) for i in range(9)]) == 0.75, "3 ends, 4 arrivals"
    assert completion_ratio(steady[:1]) == 1.0


def test_workload_in_minutes_has_as_many_requests_as_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 requests at 4 per second in a tenth of a minute, and 20 at least."""
    monkeypatch.setattr("chairlift.lab.presets.rate_sweep.MIN_REQUESTS", 20)
    system = next(each for each in study("vllm-fig12", 1, None).systems() if each.label.startswith("Alpaca"))
    workload = {"histogram": "alpaca", "num_prompts": 30}
    timed, whole = (replace(system, workload=workload | more) for more in ({"minutes": 0.1}, {}))
    requests = timed.requests(0)
    for rate, count in ((4.0, 24), (0.5, 20)):
        assert measure_run(timed, requests, rate) == measure_run(whole, requests[:count], rate)
