"""The presets of the vLLM paper with few requests: results and printed output."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from chairlift.errors import ConfigError
from chairlift.events import EventList, Step
from chairlift.lab.presets import PresetOptions, PresetResult, find_preset, print_preset
from chairlift.lab.presets import vllm_experiments as vllm
from chairlift.lab.presets import vllm_fig2 as fig2
from chairlift.lab.presets import vllm_fig12 as fig12
from chairlift.lab.presets import vllm_fig13 as fig13
from chairlift.lab.presets import vllm_fig15 as fig15
from chairlift.lab.presets import vllm_fig18b as fig18b
from chairlift.lab.presets.vllm_experiments import DATASETS, NUM_SLOTS, POLICIES, draw_requests, steady_state
from chairlift.lab.workload.request import WorkloadRequest


@pytest.fixture
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "NUM_SEEDS", 1)


def run_small(name: str, num_prompts: int) -> PresetResult:
    """Runs a preset, and checks the printed output that all of them have in common."""
    preset = find_preset(name)
    result = preset.run(PresetOptions(workload_seed=3, num_prompts=num_prompts))
    out = io.StringIO()
    print_preset(preset, result, out)
    print_preset(preset, result, out, as_json=True)
    last = json.loads(out.getvalue().splitlines()[-1])
    assert last["preset"] == name
    assert last["published"]
    assert last["ours"] == json.loads(json.dumps(result.ours))
    assert result.notes
    assert "flops_efficiency" in dict(result.constants)
    assert all(any("published" in column for column in table.columns) for table in result.tables[-1:])
    return result


def test_shares_of_memory_add_up(one_seed: None) -> None:
    ours = run_small("vllm-fig2", 150).ours
    assert list(ours) == list(POLICIES)
    for shares in ours.values():
        assert sum(shares[part] for part in fig2.PARTS) == pytest.approx(100, abs=0.03)
    assert ours["max"]["external"] == pytest.approx(100 * (1 - 7 * 2048 / NUM_SLOTS), abs=0.005)
    assert ours["paged"]["waste"] == pytest.approx(100 - ours["paged"]["token_states"], abs=0.01)
    assert ours["max"]["token_states"] < ours["oracle"]["token_states"] < ours["paged"]["token_states"]


def test_max_runs_seven_requests(one_seed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "POLICIES", {"max": POLICIES["max"]})
    ours = run_small("vllm-fig13", 40).ours
    assert {dataset: ours[dataset]["max"]["saturated"] for dataset in DATASETS} == {"sharegpt": 7.0, "alpaca": 7.0}


@pytest.mark.parametrize(("dataset", "count"), [("sharegpt", 1000), ("alpaca", 3000)])
def test_batches_and_token_states_equal_the_published_ones(dataset: str, count: int) -> None:
    """With nearly as many requests as the preset; the numbers depend on lengths and memory only."""
    workloads = [draw_requests(dataset, seed, count) for seed in range(2)]
    for kv in ("pow2", "oracle"):
        runs = [steady_state(kv, requests) for requests in workloads]
        assert sum(run.batch for run in runs) / 2 == pytest.approx(fig13.PUBLISHED[dataset][kv], rel=0.05)
        if dataset == "sharegpt":
            shares = sum(run.shares["token_states"] for run in runs) / 2
            assert shares == pytest.approx(fig2.PUBLISHED[kv]["token_states"], abs=3)


def test_numbers_of_fig13_are_those_of_the_runs(one_seed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fig13, "NUM_PROMPTS", {"alpaca": 0})
    result = run_small("vllm-fig13", 400)
    requests = draw_requests("alpaca", 3, 400)
    assert result.ours["alpaca"]["oracle"]["saturated"] == round(steady_state("oracle", requests).batch, 2)
    assert result.ours["alpaca"]["oracle"]["at_rate"] == round(steady_state("oracle", requests, 30.0).batch, 2)
    (table,) = result.tables
    assert [row[1] for row in table.rows] == ["7.00", "43.24", "72.75", "132.44"]


def test_too_few_prompts_are_an_error(one_seed: None) -> None:
    with pytest.raises(ConfigError, match="num_prompts=5 is too small"):
        run_small("vllm-fig2", 5)


def test_paging_sustains_the_highest_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "DATASETS", {"alpaca": "Alpaca"})
    monkeypatch.setattr(fig12, "NAMES", {kv: fig12.NAMES[kv] for kv in ("static", "max", "paged")})
    ours = run_small("vllm-fig12", 60).ours["alpaca"]
    for points in ours["normalized_latency_s"].values():
        rates = [rate for rate, _ in points]
        assert rates == sorted(set(rates))
        assert all(latency > 0.02 for _, latency in points), "no step is faster than reading the weights"
    at = ours["sustained_rate"]
    assert at["static"][1] < at["max"][1]
    assert at["paged"] == [None] * 4, "so few requests do not fill the memory"


def test_more_outputs_per_prompt_save_more_memory(one_seed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fig15, "NUM_PROMPTS", {"alpaca": 0})
    result = run_small("vllm-fig15", 200)
    two, four, six = result.ours["alpaca"]["parallel_sampling"]
    assert 0 < two < four < six < 100
    assert result.ours["alpaca"]["beam_search"] is None
    assert [row[-1] for row in result.tables[0].rows] == ["-", "-", "-"]


@pytest.mark.parametrize("count", [2, 4])
def test_siblings_share_the_full_blocks_of_their_prompt(count: int) -> None:
    """A prompt of 33 tokens has two full blocks, which all siblings except one save."""
    events = EventList()
    fig15.simulate_siblings([WorkloadRequest(f"r{i}", 0.0, bytes(33), 15) for i in range(5)], count, events)
    steps = [event for event in events.events if isinstance(event, Step)]
    assert steps[0].saved == 0, "the leaders compute their prompts first"
    assert max(step.saved for step in steps) == 5 * (count - 1) * 32
    assert sum(sum(step.num_new) for step in steps) == 5 * count * 15


def test_a_prompt_of_one_block_is_not_shared() -> None:
    events = EventList()
    fig15.simulate_siblings([WorkloadRequest(f"r{i}", float(i), bytes(16), 20) for i in range(5)], 2, events)
    assert {event.saved for event in events.events if isinstance(event, Step)} == {0}


def test_throughput_ratio_grows_with_the_shared_prefix(one_seed: None) -> None:
    ours = run_small("vllm-fig16", 400).ours
    assert 1 < ours["80"]["ratio"] < ours["341"]["ratio"]
    assert ours["80"]["batch"]["oracle"] < ours["80"]["batch"]["paged"] <= 256


def test_large_blocks_increase_latency_and_small_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fig18b, "NUM_PROMPTS", {"alpaca": 0})
    monkeypatch.setattr(fig18b, "BLOCK_SIZES", (1, 16, 256))
    result = run_small("vllm-fig18b", 600)
    latency: dict[int, Any] = result.ours["alpaca"]["busy_rate"]["normalized_latency_s"]
    assert latency[1] == pytest.approx(latency[16], rel=0.02)
    assert latency[256] > 1.05 * latency[16]
    assert result.ours["alpaca"]["busy_rate"]["best"] == [1, 16]


def test_best_block_sizes_are_near_the_lowest_latency() -> None:
    assert fig18b.best_sizes({1: 2.0, 2: 1.04, 4: 1.0, 8: 1.05, 16: 1.06}) == [2, 8]
