"""The time of steps that an engine measures at its start, and the chunks of prompts that it allows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.clock import VirtualClock
from chairlift.config import DEFAULT_MAX_NUM_BATCHED_TOKENS
from chairlift.core.engine_core import Executor
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import load_model
from chairlift.engine.startup.token_budget import (
    DECODE_TARGET_SECONDS,
    MAX_ROUNDS,
    MEASURING_SECONDS,
    PREFILL_TARGET_SECONDS,
    PROBE_CONTEXT,
    PROBES,
    REPEATS,
    ChunkTimer,
    SecondsOf,
    describe_chunks,
    fastest_round,
    fit_step_time,
    measure_rows,
    measure_steps,
)
from chairlift.errors import ConfigError
from chairlift.events import EngineStarted, EventList, Step, StepTimeChanged, from_json
from chairlift.lab.bench.simulation import sim_config_from_recording
from chairlift.lab.planning.planned_workload import PlannedWorkload
from chairlift.lab.planning.planner import PlannedModel, make_plan
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.loading.resolve import resolve_model
from chairlift.observability.event_log import encode_event
from chairlift.outputs import ModelRunnerOutput, SchedulerOutput
from chairlift.speculative_config import SpeculativeConfig
from chairlift.step_time import StepTime
from support.fakes import make_request
from support.native import needs_native
from support.tiny_engine import tiny_options


def linear(fixed: float, per_token: float, per_pair: float = 0.0) -> SecondsOf:
    return lambda n, context: fixed + n * (per_token + per_pair * context)


@given(st.floats(1e-4, 0.02), st.floats(1e-5, 1e-3), st.floats(0, 1e-6))
def test_the_measured_time_has_parts_for_tokens_and_for_their_context(
    fixed: float, per_token: float, per_pair: float
) -> None:
    step_time = measure_steps(linear(fixed, per_token, per_pair), 10_000)
    assert step_time is not None
    assert step_time.fixed == pytest.approx(fixed, rel=1e-6, abs=1e-9)
    assert step_time.per_token == pytest.approx(per_token, rel=1e-6, abs=1e-9)
    assert step_time.per_pair == pytest.approx(per_pair, rel=1e-6, abs=1e-12)


@given(st.floats(0, 0.1), st.floats(1e-6, 0.01), st.integers(0, 10_000))
def test_measuring_is_limited_in_time(fixed: float, per_token: float, longest: int) -> None:
    spent: list[float] = []

    def seconds_of(num_tokens: int, context: int) -> float:
        assert num_tokens + context <= longest
        spent.append(fixed + per_token * num_tokens)
        return spent[-1]

    measured = measure_steps(seconds_of, longest)
    assert (measured is None) == (longest < PROBES[0])
    shortest, second = (REPEATS * (fixed + per_token * probe) for probe in PROBES[:2])
    assert sum(spent) <= (max(MEASURING_SECONDS, shortest + second) + second) * (1 + 1e-9)


@given(st.lists(st.floats(1e-6, 0.05), min_size=8, max_size=8))
def test_a_disturbed_measurement_gives_no_negative_times(times: list[float]) -> None:
    left = iter(times)
    step_time = measure_steps(lambda _n, _context: next(left), 10_000)
    assert step_time is not None
    assert min(step_time.fixed, step_time.per_token, step_time.per_pair) >= 0
    assert step_time.largest_chunk(0, 1.0) >= 0


def test_the_faster_of_two_measurements_is_used() -> None:
    slow_first = iter([0.09, 0.008, 0.03, 0.02, 0.1, 0.008])
    measured = measure_steps(lambda _n, _context: next(slow_first), PROBES[1])
    assert measured == fit_step_time({PROBES[0]: 0.008, PROBES[1]: 0.02}, context=0, per_pair=0.0)


def test_a_busy_start_is_measured_until_two_rounds_agree(caplog: pytest.LogCaptureFixture) -> None:
    def rounds(*factors: float) -> Iterator[StepTime]:
        return iter([StepTime(0.001 * factor, 0.0005 * factor, 0.0, 0.2, 1.0) for factor in factors])

    def fastest(*factors: float) -> float:
        left = rounds(*factors)
        found = fastest_round(lambda: next(left))
        assert found is not None
        assert not [*left], "no further round is needed"
        return found.per_token / 0.0005

    assert fastest(1.0, 1.05) == 1.0
    assert fastest(9.0, 4.0, 1.04, 1.0) == 1.0
    assert not caplog.records
    assert fastest(*(2.0**power for power in range(MAX_ROUNDS))) == 1.0
    assert "differ between 6 rounds" in caplog.text
    assert "load average" in caplog.text
    assert fastest_round(lambda: None) is None


def test_the_line_at_the_start_describes_chunks_at_the_begin_and_after_a_long_context() -> None:
    step_time = StepTime(0.01, 0.002, 1e-6, DECODE_TARGET_SECONDS, PREFILL_TARGET_SECONDS)
    assert describe_chunks(step_time, 512, 2048) == (
        "max_num_batched_tokens=512: on this machine chunks of a prompt have up to 432 tokens (967 ms per step; "
        "target: at most 1000 ms), and up to 80 (173 ms; target: 200 ms) while other requests decode"
    )
    assert describe_chunks(step_time, 512, 32768).endswith("; after 16384 tokens of context: 48 (894 ms) and 16")


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The chunks that were timed and their contexts, on a simulated machine where 128 tokens take 0.17 s."""
    chunks: list[tuple[int, int]] = []
    true_seconds_of = ChunkTimer.seconds_of

    def seconds_of(self: ChunkTimer, num_tokens: int, context: int) -> float:
        assert true_seconds_of(self, num_tokens, context) > 0
        chunks.append((num_tokens, context))
        return linear(0.01, 0.00125)(num_tokens, context)

    monkeypatch.setattr(ChunkTimer, "seconds_of", seconds_of)
    monkeypatch.setattr("chairlift.engine.startup.decoder_engine.fastest_round", fastest_round)  # See conftest.py.
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
def test_an_engine_measures_the_time_of_steps_and_logs_the_sizes_of_chunks(
    probed: list[tuple[int, int]], tiny_model_dir: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="chairlift"):
        event = started(tiny_model_dir("llama"))
    assert event.max_num_batched_tokens == DEFAULT_MAX_NUM_BATCHED_TOKENS
    assert event.step_time is not None
    assert event.step_time["per_token"] == pytest.approx(0.00125)
    context = event.max_model_len - 1 - 128
    of_a_round = [(8, context)] * 2 + [(32, context)] * 2
    assert probed == of_a_round * 2, "128 tokens would take too long, and two rounds agree"
    assert caplog.messages[-1].startswith("max_num_batched_tokens=512: on this machine chunks of a prompt have up to ")
    assert started(tiny_model_dir("llama"), max_num_seqs=600).max_num_batched_tokens == 600
    assert started(tiny_model_dir("llama"), num_kv_blocks=1, block_size=8).step_time is None, (
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
    options: dict[str, Any], expected: int, probed: list[tuple[int, int]], tiny_model_dir: Callable[..., Path]
) -> None:
    assert started(tiny_model_dir("llama"), **options).max_num_batched_tokens == expected
    assert not probed


@needs_native
def test_engines_over_one_model_measure_once(
    probed: list[tuple[int, int]], tiny_model_dir: Callable[..., Path]
) -> None:
    config = EngineConfig(model=str(tiny_model_dir("opt")), skip_tokenizer_init=True, num_kv_blocks=32)
    loaded = load_model(config)
    times = {build_engine(config, loaded=loaded).facts.scheduler_config.step_time for _ in range(3)}
    assert len(times) == 1
    assert [num_tokens for num_tokens, _context in probed] == [8, 8, 32, 32] * 2


class FasterExecutor:
    """Advances a clock by a twentieth of the times of the simulated machine."""

    def __init__(self, executor: Executor, clock: VirtualClock) -> None:
        self._executor, self._clock = executor, clock

    def submit(self, output: SchedulerOutput) -> Any:
        self._clock.advance(linear(0.01, 0.00125)(sum(output.num_scheduled_tokens.values()), 0) / 20)
        return self._executor.submit(output)

    def result(self, handle: Any) -> ModelRunnerOutput:
        return self._executor.result(handle)


@needs_native
def test_an_engine_that_starts_slowly_computes_more_tokens_in_a_step_when_its_steps_are_fast(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ChunkTimer, "seconds_of", lambda _self, n, context: linear(0.1, 0.0125)(n, context))
    clock, events = VirtualClock(), EventList()
    config = EngineConfig(**tiny_options(tmp_path, num_kv_blocks=128))
    engine = build_engine(
        config, clock=clock, events=events, around_executor=lambda executor: FasterExecutor(executor, clock)
    )
    largest = []
    with caplog.at_level(logging.INFO, logger="chairlift"):
        for number in range(8):
            start = len(events.events)
            engine.core.add(make_request(f"r{number}", [number, *range(200), *range(200)], max_tokens=2))
            while engine.core.has_work:
                engine.core.step()
            clock.advance(30.0)
            steps = [event for event in events.events[start:] if isinstance(event, Step)]
            largest.append(max(sum(step.num_scheduled) for step in steps))
    changes = [event for event in events.events if isinstance(event, StepTimeChanged)]
    assert len(changes) == 2
    assert all(later.time - earlier.time >= 60.0 for earlier, later in pairwise(changes))
    assert largest[0] == 64, "0.1 s + 64 * 0.0125 s are less than a second"
    assert largest[-1] == 401, "the whole prompt"
    lines = [line for line in caplog.messages if line.startswith("steps are faster than estimated: ")]
    assert len(lines) == len(changes)
    assert "chunks of a prompt have up to" in lines[0]


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


def test_a_simulation_of_a_recorded_engine_uses_its_budget_and_its_time_of_steps() -> None:
    step_time = StepTime(0.01, 0.002, 1e-6, DECODE_TARGET_SECONDS, PREFILL_TARGET_SECONDS)
    recorded = EngineStarted(0.0, "tiny", 16, 64, 8, 128, 256, "fcfs", "paged", True, step_time=asdict(step_time))
    recorded = from_json(encode_event(recorded))
    assert isinstance(recorded, EngineStarted)
    simulated = sim_config_from_recording(EngineConfig(), recorded)
    assert simulated.scheduler.step_time == step_time
    assert simulated.engine_started().step_time == recorded.step_time
    assert sim_config_from_recording(EngineConfig(max_num_batched_tokens=77), recorded).scheduler.step_time is None

    def budget(**options: int) -> int:
        return sim_config_from_recording(EngineConfig(**options), recorded).scheduler.max_num_batched_tokens  # type: ignore[arg-type]

    assert budget() == 128
    assert budget(max_num_batched_tokens=77) == 77
    assert budget(max_num_seqs=200) == 200


def test_a_planned_command_does_not_set_the_default_budget(tiny_model_dir: Callable[..., Path]) -> None:
    def command(**options: Any) -> str:
        files = resolve_model(str(tiny_model_dir("llama")))
        config = files.config()
        model = PlannedModel(files.name, files.name, config, files.formats(config))
        return make_plan(
            model,
            EngineConfig(num_kv_blocks=32, **options),
            PlannedWorkload(input_len=parse_lengths("fixed:8"), output_len=parse_lengths("fixed:8")),
        ).serve

    assert "--max-num-batched-tokens" not in command()
    assert "--max-num-batched-tokens 99" in command(max_num_batched_tokens=99)


def test_rows_are_timed_up_to_the_longest_request() -> None:
    calls: list[tuple[int, int]] = []

    def seconds_of(rows: int, context: int) -> float:
        calls.append((rows, context))
        return 1.0 + 0.1 * rows

    measured = measure_rows(seconds_of, 600)
    assert measured is not None
    assert list(measured.points) == [1, 2, 4, 8, 16, 32, 64]
    assert measured.seconds(10) == pytest.approx(2.0)
    assert {context for _, context in calls} == {PROBE_CONTEXT}
    short = measure_rows(seconds_of, 5)
    assert short is not None
    assert list(short.points) == [1, 2, 4]
    limited = measure_rows(seconds_of, 600, max_rows=9)
    assert limited is not None
    assert list(limited.points) == [1, 2, 4, 8]
    assert measure_rows(seconds_of, 1) is None


def test_an_engine_with_speculative_decoding_times_its_rows(
    tiny_model_dir: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    events = EventList()
    config = EngineConfig(
        model=str(tiny_model_dir("llama")), skip_tokenizer_init=True, num_kv_blocks=16, speculative_config={}
    )
    with caplog.at_level(logging.INFO, logger="chairlift"):
        engine = build_engine(config, events=events)
    (started,) = (event for event in events.events if isinstance(event, EngineStarted))
    assert from_json(encode_event(started)) == started
    assert started.speculative_config == asdict(SpeculativeConfig())
    assert started.row_time is not None
    assert [rows for rows, _ in started.row_time][:3] == [1, 2, 4]
    assert "speculative decoding: time of a step by its number of rows: 1: " in caplog.text
    simulated = sim_config_from_recording(replace(config, model=None), started)
    assert simulated.scheduler.row_time == engine.facts.scheduler_config.row_time
