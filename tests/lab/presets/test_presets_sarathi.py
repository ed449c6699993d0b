"""The preset sarathi: lengths, limits, sustained rates and printed output."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from chairlift.lab.metrics.requests import RequestMetrics
from chairlift.lab.presets import PresetOptions, find_preset, print_preset
from chairlift.lab.presets.capacity import at_rate
from chairlift.lab.presets.sarathi import (
    CHAT,
    DATASETS,
    DEPLOYMENTS,
    MISTRAL,
    YI,
    Dataset,
    Deployment,
    Quantiles,
    SarathiRun,
    SustainedCapacity,
    capacities,
    completion_ratio,
)


def test_lengths_have_the_published_quantiles() -> None:
    lens = Quantiles(100, 1000, 1200).sample(np.random.default_rng(0), 20_000)
    for limit, share in ((100, 0.5), (1000, 0.9)):
        assert sum(length <= limit for length in lens) / len(lens) == pytest.approx(share, abs=0.01)
    assert min(lens) >= 1
    assert max(lens) <= 1200


@pytest.mark.parametrize("dataset", DATASETS, ids=lambda d: d.name)
def test_requests_fit_max_model_len(dataset: Dataset) -> None:
    requests = dataset.workload(0, 50, 100)
    assert all(len(r.prompt_token_ids) + r.output_len <= dataset.max_model_len for r in requests)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda d: d.model.name)
def test_published_limits_are_5_and_25_decode_steps(deployment: Deployment) -> None:
    """Agrawal et al., section 5.1: they agree within a sixth, without fitting."""
    assert 5 * deployment.decode_seconds == pytest.approx(deployment.strict, rel=1 / 6)
    assert 25 * deployment.decode_seconds == pytest.approx(deployment.relaxed, rel=1 / 6)


def test_smaller_chunks_shorten_the_time_between_tokens() -> None:
    requests = at_rate(CHAT.workload(0, 24, 100), 1.0)
    whole, chunked, small = (YI.run(requests, CHAT.max_model_len, budget) for budget in (8192, 1024, 512))
    assert small.itl_p99 < chunked.itl_p99 < whole.itl_p99
    assert whole.ttft_p50 < small.ttft_p50


def finished(arrival: float, end: float) -> RequestMetrics:
    return RequestMetrics(f"r{arrival}-{end}", 1, 0, 0, "length", arrival, arrival, [end])


def test_completion_ratio() -> None:
    steady = [finished(float(i), i + 0.5) for i in range(10)]
    assert completion_ratio(steady) == 1.0
    assert completion_ratio([finished(float(i), 100.0) for i in range(10)]) == 0.0
    assert completion_ratio([finished(float(i), 1.5 * i + 0.1) for i in range(9)]) == 0.75, "3 ends, 4 arrivals"
    assert completion_ratio(steady[:1]) == 1.0


def test_sustained_runs_meet_all_limits() -> None:
    assert SarathiRun(1.0, 0.1, 2.0, 0.9).is_sustained(0.1)
    assert not SarathiRun(1.0, 0.11, 2.0, 0.9).is_sustained(0.1)
    assert not SarathiRun(1.0, 0.1, 2.1, 0.9).is_sustained(0.1)
    assert not SarathiRun(1.0, 0.1, 2.0, 0.89).is_sustained(0.1)


def test_capacities_of_one_deployment() -> None:
    strict, relaxed = capacities(MISTRAL, CHAT, 0, 32)
    assert strict.whole <= relaxed.whole, "a strict limit implies the relaxed one"
    assert 0 < strict.whole <= strict.chunked
    assert strict.to_dict()["gain"] == pytest.approx(strict.chunked / strict.whole, abs=0.001)
    none = SustainedCapacity(MISTRAL, CHAT, "strict", 0.1, 512, 0.0, float("inf"))
    assert none.gain is None
    assert json.loads(json.dumps(none.to_dict(), allow_nan=False))["requests_per_s"] == {"whole": 0.0, "chunked": None}


def test_output_has_published_and_simulated_numbers() -> None:
    preset = find_preset("sarathi")
    out = io.StringIO()
    result = preset.run(PresetOptions(workload_seed=2, num_prompts=4))
    print_preset(preset, result, out)
    print_preset(preset, result, out, as_json=True)
    assert "seed 2" in out.getvalue()
    record = json.loads(out.getvalue().splitlines()[-1])
    assert record["published"]["gain_over_vllm"] == {"mistral-7b": 2.6, "yi-34b": 3.7, "falcon-180b": 5.6}
    assert {entry["itl_p99"] for entry in record["published"]["ablation"]} == {0.68, 0.14, 1.38, 0.17}
    assert len(record["ours"]["capacity"]) == 8
    assert len(record["ours"]["ablation"]) == 8
