from __future__ import annotations

from preset_studies import mean, run, systems

from chairlift.lab.presets.measures import measure_memory


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
