"""The preset orca: baselines, rate sweep and printed output."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.lab.presets import PresetOptions, find_preset, print_preset
from chairlift.lab.presets.orca import (
    LATENCY,
    ORCA,
    QUEUED,
    SINGLE,
    STATIC,
    SYSTEMS,
    TOKEN_BY_TOKEN,
    rate_sweep,
    run_system,
    single_request_latency,
    throughput_at,
    token_by_token,
    workload,
)
from chairlift.lab.workload.request import WorkloadRequest


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


def test_workload_has_the_published_ranges() -> None:
    requests = workload(0, 200)
    prompts = [len(r.prompt_token_ids) for r in requests]
    outputs = [r.output_len for r in requests]
    assert (min(prompts) >= 32, max(prompts) <= 512, min(outputs) >= 1, max(outputs) <= 128) == (True,) * 4
    assert all(r.max_output_len == r.output_len for r in requests), "Orca reserves what will be written"


def test_throughput_with_a_full_queue() -> None:
    burst = [replace(r, arrival=0.0) for r in workload(0, 32)]
    rates = {system.name: run_system(system, burst).requests_per_s for system in QUEUED}
    assert rates[ORCA.name] > rates[STATIC.name] > rates[TOKEN_BY_TOKEN.name]
    assert rates[STATIC.name] > rates[SINGLE.name]


def test_latency_is_per_original_output_token() -> None:
    """Equal prompts are computed in one step, so the baseline equals the static batch; a single request equals Orca."""
    alike = [WorkloadRequest(f"r{i}", 0.0, [i] * 64, 16) for i in range(2)]
    assert run_system(TOKEN_BY_TOKEN, alike) == run_system(STATIC, alike)
    assert run_system(SINGLE, alike[:1]) == run_system(ORCA, alike[:1])
    assert 0.02 < single_request_latency() < LATENCY / 2, "faster than the 95 ms of the paper's engine"


def test_more_latency_allows_more_throughput() -> None:
    sweep = rate_sweep(ORCA, workload(0, 24))
    low, high = (throughput_at(factor * single_request_latency(), sweep) for factor in (2, 8))
    assert 0 < low <= high
    assert sweep(1.0) is sweep(1.0)
    assert throughput_at(1e-6, rate_sweep(ORCA, workload(0, 2))) == 0.0


def test_output_has_published_and_simulated_numbers() -> None:
    preset = find_preset("orca")
    out = io.StringIO()
    result = preset.run(PresetOptions(workload_seed=1, num_prompts=12))
    print_preset(preset, result, out)
    print_preset(preset, result, out, as_json=True)
    assert "seed 1" in out.getvalue()
    record = json.loads(out.getvalue().splitlines()[-1])
    assert record["published"]["multiple"] == pytest.approx(6.81 / 0.185, rel=0.01)
    ours = record["ours"]["at_published_latency"]
    assert set(ours["requests_per_s"]) == {system.name for system in SYSTEMS}
    assert ours["multiples"][SINGLE.name] > 1
