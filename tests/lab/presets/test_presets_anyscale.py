"""The preset anyscale: iterations, systems and printed output."""

from __future__ import annotations

import io
import json

import pytest

from chairlift.errors import ConfigError
from chairlift.lab.presets import PresetOptions, find_preset, print_preset
from chairlift.lab.presets.anyscale import (
    DEVICE,
    EXACT_CAP,
    EXACT_QUOTA,
    LATENCY_SYSTEMS,
    MAX,
    MODEL,
    NAIVE,
    NUM_SLOTS,
    PAGED,
    RATES,
    STATIC,
    SYSTEMS,
    AnyscaleSystem,
    num_iterations,
    run_latency,
    run_throughput,
)
from chairlift.lab.presets.capacity import measure
from chairlift.lab.sim.roofline import Roofline
from chairlift.lab.workload.anyscale import CAPS, STATIC_BATCH_SIZES, throughput_workload

SMALL = 32
SmallRun = tuple[dict[str, dict[int, float]], dict[str, dict[int, int]], dict[int, tuple[int, int]]]


@pytest.fixture(scope="module")
def small() -> SmallRun:
    """Returns throughputs and steps by system and cap, and iterations by arithmetic."""
    metrics, iterations = run_throughput(SMALL)
    rates = {name: {cap: m.total_tokens_per_s for cap, m in by_cap.items()} for name, by_cap in metrics.items()}
    steps = {name: {cap: m.num_steps for cap, m in by_cap.items()} for name, by_cap in metrics.items()}
    return rates, steps, iterations


def test_iterations_of_the_published_workload() -> None:
    lens = [r.output_len for r in throughput_workload(1536)]
    assert num_iterations(lens, STATIC_BATCH_SIZES[1536]) == (210_750, 66_942)


def test_simulated_iterations_equal_the_computed_ones(small: SmallRun) -> None:
    _, steps, iterations = small
    for cap in CAPS:
        assert (steps[NAIVE.name][cap], steps[STATIC.name][cap]) == iterations[cap]


def test_continuous_is_at_least_as_fast_as_static(small: SmallRun) -> None:
    """Max has memory for 7 requests, fewer than the static batches of the shorter caps."""
    rates, _, _ = small
    for cap in CAPS:
        assert rates[NAIVE.name][cap] <= rates[STATIC.name][cap]
        for system in SYSTEMS:
            if system.static_run_to is None and system is not MAX:
                assert rates[system.name][cap] > rates[STATIC.name][cap], (system.name, cap)
        assert rates[MAX.name][cap] <= rates[PAGED.name][cap]


def test_declared_length_reserves_as_much_as_oracle(small: SmallRun) -> None:
    rates, _, _ = small
    assert rates["continuous, exact, max_tokens = length"] == rates["continuous, oracle"]


def test_pool_has_the_published_size() -> None:
    assert NUM_SLOTS == 15_728
    assert PAGED.config(1536).num_blocks * 16 == NUM_SLOTS
    assert EXACT_QUOTA.config(1536).num_blocks == 8100 // 16


@pytest.mark.parametrize(("system", "size"), [(MAX, 7), (EXACT_CAP, 7), (STATIC, 4)])
def test_peak_batches_at_the_largest_cap(system: AnyscaleSystem, size: int) -> None:
    """15,728 slots hold seven reservations of 512 + 1536, the same by max_model_len and by max_tokens."""
    requests = system.requests(throughput_workload(1536, count=SMALL), 1536)
    assert measure(requests, system.config(1536), Roofline(MODEL, DEVICE)).peak_batch_size == size


def test_latency_grows_with_the_rate_and_with_reservation() -> None:
    slow, fast = (run_latency(PAGED, rate, SMALL) for rate in (1, 8))
    assert slow.percentile(50) < fast.percentile(50)
    assert (
        fast.percentile(50) <= run_latency(MAX, 8, SMALL).percentile(50) < run_latency(STATIC, 8, SMALL).percentile(50)
    )
    cdf = list(fast.to_dict()["e2e_latency_cdf"].values())
    assert cdf == sorted(cdf)


def test_output_has_published_and_simulated_numbers() -> None:
    preset = find_preset("anyscale")
    out = io.StringIO()
    result = preset.run(PresetOptions(num_prompts=8))
    print_preset(preset, result, out)
    print_preset(preset, result, out, as_json=True)
    record = json.loads(out.getvalue().splitlines()[-1])
    assert record["published"]["total_tokens_per_s"][PAGED.name] == {"32": 6121, "128": 3592, "512": 2029, "1536": 1898}
    ours = record["ours"]
    assert set(ours["total_tokens_per_s"]) == {system.name for system in SYSTEMS}
    assert set(ours["latency"]) == {str(rate) for rate in RATES}
    assert set(ours["saturation"]) == {system.name for system in LATENCY_SYSTEMS}


def test_workload_seed_is_rejected() -> None:
    with pytest.raises(ConfigError, match="workload_seed=1 does not apply; its options are: num_prompts"):
        find_preset("anyscale").run(PresetOptions(workload_seed=1))
