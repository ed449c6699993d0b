"""The presets: their data, options, output, and simulated numbers that equal the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from preset_studies import mean, run, study, systems

from chairlift.errors import ConfigError
from chairlift.lab.presets import PRESETS, RUNNERS, find_preset, print_preset, print_presets, print_title
from chairlift.lab.presets.measures import SteadyStateTally
from chairlift.lab.presets.study import HEADINGS, MeasuredValue, StudyResult, at_rate, format_value
from chairlift.lab.sim.simulator import simulate

MAX, POW2, ORACLE = "Orca (Max) = max", "Orca (Pow2) = pow2", "Orca (Oracle) = oracle"
PAGED = "vLLM = paged"


def test_every_preset_is_listed_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(preset.data["title"] and preset.data["source"] for preset in PRESETS.values())
    print_presets(PRESETS.values())
    printed = capsys.readouterr().out
    assert all(name in printed for name in PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_data_name_systems_measures_and_rows_that_exist(name: str) -> None:
    data = PRESETS[name].data
    assert data["notes"]
    for part in PRESETS[name].studies(trace=Path("trace") if "trace" in data else None):
        assert part.settings["runner"] in RUNNERS
        labels = {system.label for system in part.systems()}
        labels |= {f"{rate:g}/s, {system.label}" for system in part.systems() for rate in system.rates}
        labels |= {f"load {load:g}, {each.label}" for each in part.systems() for load in part.settings.get("loads", ())}
        assert set(part.settings.get("published", {})) <= labels
        measures = {*part.measures, *part.settings.get("limits", {})}
        assert measures <= {*HEADINGS, *part.settings.get("limits", {})}
        measures |= {"ratio"} if part.settings.get("ratio") else set()
        for row in part.settings.get("published", {}).values():
            assert {measure.removesuffix(" ratio") for measure in row} <= measures


def test_vllm_fig3_equals_the_published_numbers() -> None:
    """Kwon et al., SOSP'23, Figure 3: 2038 and 507 slots are never used."""
    (result,) = find_preset("vllm-fig3").run()
    assert {label: mean(result, label, "never_used") for label in result.rows} == {"A": 2038, "B": 507}
    for label, row in result.study.settings["published"].items():
        assert all(mean(result, label, measure) == value for measure, value in row.items())


@pytest.mark.parametrize(("dataset", "count"), [("sharegpt", 400), ("alpaca", 1000)])
def test_batches_and_token_states_equal_the_published_ones(dataset: str, count: int) -> None:
    """With fewer requests than the preset; the numbers depend on lengths and memory only."""
    case = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}[dataset]
    cases = {case: {"workload": {"histogram": dataset}}}
    measures = ["batch", "token_states"]
    result = run("vllm-fig13", 0, count, cases=cases, seeds=1, measures=measures, systems=[POW2, ORACLE])
    shares = find_preset("vllm-fig2").data["studies"][0]["published"]
    for name in (POW2, ORACLE):
        label = f"{case}, {name}"
        assert mean(result, label, "batch") == pytest.approx(result.published(label, "batch"), rel=0.05)
        if dataset == "sharegpt":
            assert mean(result, label, "token_states") == pytest.approx(shares[name]["token_states"], abs=3)


def test_shares_of_memory_add_up() -> None:
    result = run("vllm-fig2", 0, 100, seeds=1)
    for label in result.rows:
        parts = [mean(result, label, name) for name in ("token_states", "reserved", "internal", "external")]
        assert sum(parts) == pytest.approx(100)
    assert mean(result, MAX, "external") == pytest.approx(100 * (1 - 7 * 2048 / 15_728))
    shares = [mean(result, label, "token_states") for label in (MAX, ORACLE, PAGED)]
    assert shares == sorted(shares)
    assert mean(result, PAGED, "waste") == pytest.approx(100 - shares[-1])


def test_more_outputs_per_prompt_save_more_memory() -> None:
    cases = {
        str(count): {"workload": {"histogram": "alpaca", "num_outputs": count, "request_rate": 40.0 / count}}
        for count in (2, 4, 6)
    }
    result = run("vllm-fig15", 0, 200, seeds=1, cases=cases)
    two, four, six = (mean(result, label, "saved") for label in cases)
    assert 0 < two < four < six < 100


def test_throughput_ratio_grows_with_the_shared_prefix() -> None:
    result = run("vllm-fig16", 0, 400, seeds=1)
    short, long = (result.ratio(f"prefix of {size} tokens, {PAGED}", "finished_per_s") for size in (80, 341))
    assert short is not None
    assert long is not None
    assert 1 < short < long
    batches = [mean(result, f"prefix of 80 tokens, {name}", "batch") for name in (ORACLE, PAGED)]
    assert batches[0] < batches[1] <= 256


def test_paging_sustains_the_highest_rates() -> None:
    case: dict[str, Any] = {"Alpaca": {"workload": {"histogram": "alpaca"}}}
    names = ["FasterTransformer = static, max", MAX, PAGED]
    limits = {"0.2 s": {"at_most": {"normalized_latency_mean": 0.2}}}
    ratio = {"of": PAGED, "measures": ["0.2 s"]}
    result = run(
        "vllm-fig12", 1, 60, cases=case, systems=names, limits=limits, ratio=ratio, published={}, tolerance=0.3
    )
    static, reserving = (mean(result, f"Alpaca, {name}", "0.2 s") for name in names[:2])
    assert 0 < static < reserving
    assert result.rows[f"Alpaca, {PAGED}"]["0.2 s"] is None, "so few requests do not fill the memory"
    assert result.ratio(f"Alpaca, {MAX}", "0.2 s") is None


def test_large_blocks_increase_latency_and_small_ones_do_not() -> None:
    cases = {"Alpaca": {"workload": {"histogram": "alpaca"}, "rates": [60]}}
    result = run("vllm-fig18b", 0, 400, cases=cases, systems=["1", "16", "256"])
    ratios = [result.ratio(label, "normalized_latency_mean") or 0.0 for label in result.rows]
    assert ratios[0] == pytest.approx(ratios[1], rel=0.02)
    assert min(ratios) == 1
    assert ratios[2] > 1.05


def test_too_few_prompts_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"num_prompts=5 is too small.* more than \d+") as caught:
        run("vllm-fig2", 0, 5, seeds=1, systems=[PAGED])
    enough = int(str(caught.value).split("more than ")[1].split(",")[0])
    assert 50 < enough < 300
    assert mean(run("vllm-fig2", 0, 2 * enough, seeds=1, systems=[PAGED]), PAGED, "token_states") > 90
    tally = SteadyStateTally(3)
    system = systems("vllm-fig2", 0, 3)[PAGED]
    simulate(at_rate(system.requests(0), float("inf")), system.config, system.cost_model, tally)
    with pytest.raises(ConfigError, match="num_prompts=3 is too small"):
        tally.value("batch")


def test_output_has_constants_tables_notes_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    preset = find_preset("vllm-fig3")
    results = preset.run()
    print_title(preset)
    print_preset(preset, results)
    print_preset(preset, results, as_json=True)
    text = capsys.readouterr().out
    places = [
        text.index(part) for part in ("Slots reserved and never", "flops_efficiency", "published", "2,038", "- No")
    ]
    assert places == sorted(places)
    record = json.loads(text.splitlines()[-1])
    assert record["preset"] == "vllm-fig3"
    assert record["studies"][0]["rows"]["A"]["never_used"] == {"published": 2038, "ours": 2038}


def test_options_that_do_not_apply_are_rejected() -> None:
    with pytest.raises(ConfigError, match="workload_seed=1 does not apply; its options are: num_prompts"):
        find_preset("anyscale").run(workload_seed=1)
    with pytest.raises(ConfigError, match="num_prompts=3 does not apply; its options are: none"):
        find_preset("vllm-fig3").run(num_prompts=3)
    with pytest.raises(ConfigError, match="is unknown; use one of "):
        find_preset("fig4")


def test_a_preset_has_the_systems_and_the_engine_of_the_one_that_it_extends() -> None:
    base, chatbot, translation = (find_preset(f"vllm-fig{number}").data for number in (2, 17, 16))
    assert chatbot["systems"] == base["systems"]
    assert chatbot["engine"] == base["engine"]
    assert list(translation["systems"]) == [ORACLE, PAGED]
    assert translation["engine"] == {**base["engine"], "model": "llama-13b"}
    assert "histogram" not in chatbot["workload"]


def test_parts_of_a_label_select_settings_and_a_case_adds_to_the_limits() -> None:
    system = systems("sarathi", 1, None, ["chunked"])["yi-34b, arxiv_summarization, strict, chunked"]
    assert system.engine.items() >= {"model": "yi-34b", "max_model_len": 16384, "max_num_batched_tokens": 512}.items()
    assert system.workload["input_len"] == "quantiles:7059,12985,16384"
    limit = {"at_most": {"itl_p99": 0.2, "queue_time_p50": 2.0}, "at_least": {"completion_ratio": 0.9}}
    assert system.limits == {"the limit": limit}


def test_one_published_ratio_stands_for_all_measures() -> None:
    result = StudyResult(study("vllm-fig12", 1, None))
    label = f"Alpaca, {ORACLE}"
    assert [result.published(label, f"{name} s per token ratio") for name in (0.1, 1)] == [1.3, 1.3]
    assert result.published(label, "0.1 s per token") is None


def test_options_reach_the_constants_and_values_have_deviations() -> None:
    chosen = find_preset("sarathi").studies(workload_seed=2, num_prompts=4)
    assert all("4 requests per run, seed 2" in dict(part.constants())[part.settings["title"]] for part in chosen)
    assert "seeds 0 to 2" in dict(study("vllm-fig2", 0, None).constants())["Slots of the KV memory by use"]
    assert MeasuredValue.from_values([1.0, 2.0, 6.0]) == MeasuredValue(3.0, 3.0)


def test_cells_have_about_three_digits() -> None:
    assert [format_value(value) for value in (None, "about 8", 0, 1, 36.9, 12.345, 1234.5, 0.12345)] == [
        "-", "about 8", "0", "1", "36.9", "12.35", "1,234", "0.123",
    ]  # fmt: skip
