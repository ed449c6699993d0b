"""Every order of the queue over a trace: the systems of the preset, its loads, and the requests of the trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from preset_studies import mean

from chairlift.config import SCHEDULING_POLICIES
from chairlift.errors import ConfigError
from chairlift.lab.presets import RUNNERS, find_preset
from chairlift.lab.presets.study import Study
from chairlift.slo import SLO

PRESET = find_preset("azure-policies")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two requests per second with 300 prompt tokens; every third output is long."""
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{i // 2:02}.{5 * (i % 2)}00000,300,{200 if i % 3 == 0 else 20}\n" for i in range(60)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows), encoding="utf-8")
    return path


def test_every_policy_serves_the_requests_of_the_trace(trace: Path) -> None:
    (study,) = PRESET.studies(trace=trace, num_prompts=20)
    systems = list(study.systems())
    assert [system.config.scheduler.scheduling_policy for system in systems] == list(SCHEDULING_POLICIES)
    requests = systems[0].requests(0)
    assert [len(request.prompt_token_ids) for request in requests] == [300] * 20
    assert [request.arrival for request in requests] == pytest.approx([index * 20 / 19 for index in range(20)])
    assert {request.slo for request in requests} == {SLO(1000, 100)}


def test_short_requests_first_have_a_lower_mean_latency(trace: Path) -> None:
    (study,) = PRESET.studies(trace=trace)
    engine = {**study.preset["engine"], "max_num_seqs": 2}
    settings = {**study.settings, "systems": ["fcfs", "srpt"], "loads": [2.0], "engine": engine}
    result = RUNNERS["rate sweep"](Study(study.preset, settings, 0, 60, trace), lambda: None)
    ratio = result.ratio("load 2, srpt", "e2e_latency_mean")
    assert ratio is not None
    assert ratio > 1.2
    assert result.ratio("load 2, fcfs", "e2e_latency_mean") == 1.0
    assert mean(result, "load 2, srpt", "goodput") > mean(result, "load 2, fcfs", "goodput")


def test_requests_that_exceed_the_model_are_left_out(trace: Path) -> None:
    (study,) = PRESET.studies(trace=trace)
    for limit, count in ((320, 40), (10, 0)):
        engine = {**study.preset["engine"], "max_model_len": limit}
        system = next(Study(study.preset, {**study.settings, "engine": engine}, 0, None, trace).systems())
        if count:
            assert len(system.requests(0)) == count
        else:
            with pytest.raises(ConfigError, match="none of 60 requests has at most 10 tokens"):
                system.requests(0)
