"""The default token budget, which is chosen by timing a few steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.config import DEFAULT_MAX_NUM_BATCHED_TOKENS
from chairlift.engine.startup import token_budget
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import load_model
from chairlift.engine.startup.token_budget import (
    BUDGETS,
    MEASURING_SECONDS,
    PROBES,
    TARGET_STEP_SECONDS,
    ChunkTimer,
    StepTimes,
    largest_budget,
    measure_steps,
)
from chairlift.errors import ConfigError
from chairlift.events import EngineStarted, EventList
from chairlift.lab.bench.simulation import sim_config_from_recording
from chairlift.lab.planning.planned_workload import PlannedWorkload
from chairlift.lab.planning.planner import PlannedModel, make_plan
from chairlift.lab.workload.lengths import FixedLength
from chairlift.loading.resolve import load_config, matrix_formats, resolve_model
from native import needs_native


def linear(fixed: float, per_token: float) -> Callable[[int], float]:
    return lambda num_tokens: fixed + per_token * num_tokens


@given(st.floats(0, 0.1), st.floats(1e-6, 0.01), st.integers(1, 600))
def test_the_budget_is_the_largest_whose_steps_are_short(fixed: float, per_token: float, seats: int) -> None:
    seconds_of = linear(fixed, per_token)
    times = measure_steps(seconds_of, 10_000)
    assert times is not None
    budget = largest_budget(times, seats)
    allowed = [b for b in BUDGETS if b >= seats] or [seats]
    assert budget in allowed
    if len(times.seconds) > 1 or not fixed:
        short = [b for b in allowed if seconds_of(b) <= TARGET_STEP_SECONDS * (1 + 1e-9)]
        almost = [b for b in allowed if seconds_of(b) <= TARGET_STEP_SECONDS * (1 - 1e-9)]
        assert max(almost, default=allowed[0]) <= budget <= max(short, default=allowed[0])


@given(st.floats(0, 0.1), st.floats(1e-6, 0.01), st.integers(0, 300))
def test_measuring_is_limited_in_time(fixed: float, per_token: float, longest: int) -> None:
    spent: list[float] = []

    def seconds_of(num_tokens: int) -> float:
        assert num_tokens <= longest
        spent.append(fixed + per_token * num_tokens)
        return spent[-1]

    times = measure_steps(seconds_of, longest)
    assert (times is None) == (longest < PROBES[0])
    assert sum(spent[2:]) <= MEASURING_SECONDS


def test_the_faster_of_two_measurements_is_used() -> None:
    slow_first = iter([0.09, 0.008, 0.03, 0.02])
    assert measure_steps(lambda _: next(slow_first), PROBES[1]) == StepTimes({PROBES[0]: 0.008, PROBES[1]: 0.02})


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks that were timed, on a simulated machine where 128 tokens take 0.17 s."""
    chunks: list[int] = []
    true_seconds_of = ChunkTimer.seconds_of

    def seconds_of(self: ChunkTimer, num_tokens: int) -> float:
        assert true_seconds_of(self, num_tokens) > 0
        chunks.append(num_tokens)
        return linear(0.01, 0.00125)(num_tokens)

    monkeypatch.setattr(ChunkTimer, "seconds_of", seconds_of)
    return chunks


def started(folder: Path, **options: Any) -> EngineStarted:
    events = EventList()
    config = EngineConfig(
        model=str(folder), skip_tokenizer_init=True, num_threads=1, **{"num_kv_blocks": 32, **options}
    )
    build_engine(config, events=events)
    (event,) = events.events
    assert isinstance(event, EngineStarted)
    return event


@needs_native
def test_an_engine_logs_the_budget_that_it_chooses(
    probed: list[int], tiny_model_dir: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="chairlift"):
        assert started(tiny_model_dir("llama")).max_num_batched_tokens == 128
    assert probed == [8, 8, 32, 32]
    assert caplog.messages[-1] == (
        "max_num_batched_tokens=128: about 170 ms per step on this machine (256 tokens: 330 ms; target: at most 200 ms)"
    )
    assert started(tiny_model_dir("llama"), max_num_seqs=200).max_num_batched_tokens == 256
    assert started(tiny_model_dir("llama"), num_kv_blocks=1).max_num_batched_tokens == 64, "estimated from 8 tokens"
    assert started(tiny_model_dir("llama"), num_kv_blocks=1, block_size=8).max_num_batched_tokens == 512, (
        "the pool has no room for a chunk"
    )


@needs_native
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_num_batched_tokens": 99}, 99),
        ({"kernels": "torch"}, DEFAULT_MAX_NUM_BATCHED_TOKENS),
        ({"kernels": "torch", "max_num_seqs": 600}, 600),
        ({"batching": "static"}, DEFAULT_MAX_NUM_BATCHED_TOKENS),
    ],
)
def test_a_configured_or_fixed_budget_is_not_measured(
    options: dict[str, Any], expected: int, probed: list[int], tiny_model_dir: Callable[..., Path]
) -> None:
    assert started(tiny_model_dir("llama"), **options).max_num_batched_tokens == expected
    assert not probed


@needs_native
def test_engines_over_one_model_measure_once(probed: list[int], tiny_model_dir: Callable[..., Path]) -> None:
    config = EngineConfig(model=str(tiny_model_dir("opt")), skip_tokenizer_init=True, num_kv_blocks=32)
    loaded = load_model(config)
    budgets = {build_engine(config, loaded=loaded).facts.scheduler_config.max_num_batched_tokens for _ in range(3)}
    assert budgets == {128}
    assert probed == [8, 8, 32, 32]


@needs_native
def test_measuring_leaves_no_request_in_the_runner(tiny_model_dir: Callable[..., Path]) -> None:
    options: dict[str, Any] = {"model": str(tiny_model_dir("llama")), "skip_tokenizer_init": True, "num_kv_blocks": 32}
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)
    prompts = [[0] * 60, list(range(3, 90))]
    answers = [LLM(**options, **more).generate(prompts, params) for more in ({}, {"max_num_batched_tokens": 64})]
    first, second = ([output.outputs[0] for output in answer] for answer in answers)
    assert first == second
    assert [output.num_cached_tokens for output in answers[0]] == [0, 0]


def test_a_budget_of_zero_is_rejected() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens must be at least 1, got 0"):
        EngineConfig(max_num_batched_tokens=0)


def test_planners_use_the_largest_default_budget() -> None:
    assert max(token_budget.BUDGETS) == EngineConfig().largest_token_budget == DEFAULT_MAX_NUM_BATCHED_TOKENS


def test_a_simulation_of_a_recorded_engine_uses_its_budget() -> None:
    recorded = EngineStarted(0.0, "tiny", 16, 64, 8, 128, 256, "fcfs", "paged", True)

    def budget(**options: int) -> int:
        return sim_config_from_recording(EngineConfig(**options), recorded).scheduler.max_num_batched_tokens  # type: ignore[arg-type]

    assert budget() == 128
    assert budget(max_num_batched_tokens=77) == 77
    assert budget(max_num_seqs=200) == 200


def test_a_planned_command_does_not_set_the_default_budget(tiny_model_dir: Callable[..., Path]) -> None:
    def command(**options: Any) -> str:
        files = resolve_model(str(tiny_model_dir("llama")))
        config = load_config(files)
        model = PlannedModel(files.name, files.name, config, matrix_formats(files, config))
        return make_plan(
            model,
            EngineConfig(num_kv_blocks=32, **options),
            PlannedWorkload(input_len=FixedLength(8), output_len=FixedLength(8)),
        ).serve

    assert "--max-num-batched-tokens" not in command()
    assert "--max-num-batched-tokens 99" in command(max_num_batched_tokens=99)
