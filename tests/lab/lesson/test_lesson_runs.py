"""The lesson on a tiny model: its runs are those of `bench compare` and of the simulator, and its table shows them."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from chairlift.events import Event, EventList, RequestArrived, Step
from chairlift.lab.bench.compare import run_compare
from chairlift.lab.bench.policies import ComparedPolicy
from chairlift.lab.bench.simulation import ProgressSink
from chairlift.lab.lesson import summary
from chairlift.lab.lesson.runs import (
    GENEROUS_MAX_TOKENS,
    POLICIES,
    TITLES,
    Lesson,
    RemainingTime,
    lesson_options,
    run_lesson,
    simulated_events,
)
from chairlift.lab.lesson.summary import ROWS, lesson_bars, lesson_reasons, lesson_rows, lesson_table, lesson_values
from chairlift.lab.report.recorded_run import recorded_run
from chairlift.lab.sim.fitted_cost_model import fit_cost_model
from support.command_runner import invoke
from support.tiny_engine import CONFIG
from support.tiny_lesson import tiny_config, tiny_lesson


@pytest.fixture(autouse=True)
def few_simulated_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "NUM_SIMULATED", 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lesson")


@pytest.fixture(scope="module")
def lesson(folder: Path) -> Lesson:
    return tiny_lesson(folder)


def untimed_steps(events: list[Event]) -> list[Step]:
    return [replace(event, time=0.0, scheduled_time=0.0) for event in events if isinstance(event, Step)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_the_simulator_has_the_same_steps_seats_and_slots(lesson: Lesson, policy: ComparedPolicy) -> None:
    workload = lesson.options.workload(CONFIG["vocab_size"], token_round=1)
    simulated = simulated_events(lesson.started, lesson.cost_model, policy, workload)
    assert untimed_steps(simulated) == untimed_steps(lesson.events[policy.name])


@pytest.fixture(scope="module")
def advanced() -> list[int]:
    """The requests by which the progress bar of `small_lesson` advanced."""
    return []


@pytest.fixture(scope="module")
def estimates() -> list[tuple[float, int]]:
    """The estimated seconds of the rest of `small_lesson`, and the requests that were served before."""
    return []


@pytest.fixture(scope="module")
def small_lesson(folder: Path, advanced: list[int], estimates: list[tuple[float, int]]) -> Lesson:
    options = lesson_options(1, 32)
    remaining = RemainingTime(options, 0, lambda seconds: estimates.append((seconds, sum(advanced))))
    return run_lesson(tiny_config(folder), options, ProgressSink(lambda steps=1: advanced.append(steps)), remaining)


def test_bench_compare_has_the_same_steps_and_counts(small_lesson: Lesson, folder: Path) -> None:
    events = EventList()
    result, tokens = run_compare(tiny_config(folder), small_lesson.options, events)
    steps = [step for of_run in small_lesson.events.values() for step in untimed_steps(of_run)]
    assert untimed_steps(events.events) == steps
    assert tokens == small_lesson.tokens
    for policy in small_lesson.events:
        values = lesson_values(small_lesson, policy)
        for key in ("num_steps", "mean_batch_size", "output_tokens", "padding_tokens", "preemptions"):
            assert values[key] == result.runs[policy][0][key]


def test_the_rest_of_the_lesson_is_estimated_when_the_first_policy_is_served(
    small_lesson: Lesson, estimates: list[tuple[float, int]]
) -> None:
    ((seconds, num_served),) = estimates
    assert num_served == 32
    cost = fit_cost_model(small_lesson.events["static"])
    workload = small_lesson.options.workload(CONFIG["vocab_size"], token_round=1)
    others = [simulated_events(small_lesson.started, cost, policy, workload) for policy in POLICIES[1:]]
    assert seconds == pytest.approx(sum(recorded_run(events).metrics.duration for events in others))


def test_the_bar_counts_the_requests_of_all_runs(small_lesson: Lesson, advanced: list[int]) -> None:
    assert sum(advanced) == 32 * len(small_lesson.events) == 32 * len(POLICIES)


def test_the_policies_differ_as_published(lesson: Lesson) -> None:
    static, reserved, exact, pow2, paged = (lesson_values(lesson, policy.name) for policy in POLICIES)
    assert static["mean_batch_size"] > 2 * static["mean_busy_seats"], "seats of finished requests are idle"
    assert reserved["mean_batch_size"] == reserved["mean_busy_seats"] <= 7
    assert static["num_steps"] > reserved["num_steps"] > exact["num_steps"] > pow2["num_steps"] > paged["num_steps"]
    # Shares are weighted by the time of steps, so on a busy machine those of the three reservations can change places.
    reservations = [each["token_states"] for each in (reserved, exact, pow2)]
    assert static["token_states"] < min(reservations) < max(reservations) < paged["token_states"]
    assert reserved["waste"] > 0.7 > 0.15 > paged["waste"]
    assert reserved["internal"] > exact["internal"] > pow2["internal"] > paged["internal"]
    assert lesson_values(lesson, "static")["speedup"] == 1.0


def test_only_exact_depends_on_the_declared_max_tokens(lesson: Lesson) -> None:
    declared = {run: [e.max_tokens for e in lesson.events[run] if isinstance(e, RequestArrived)] for run in TITLES}
    lengths = [e.output_len or 0 for e in lesson.events["exact"] if isinstance(e, RequestArrived)]
    assert declared["exact"] == [max(GENEROUS_MAX_TOKENS, length) for length in lengths] == declared["paged"]
    workload = lesson_options(0, 96, max_tokens=160).workload(CONFIG["vocab_size"], token_round=1)
    for policy in POLICIES:
        events = simulated_events(lesson.started, lesson.cost_model, policy, workload)
        is_same = [s.request_ids for s in untimed_steps(events)] == [
            s.request_ids for s in untimed_steps(lesson.events[policy.name])
        ]
        assert is_same == (policy.name != "exact"), policy.name


def test_every_bar_adds_up_to_the_pool(lesson: Lesson) -> None:
    bars = lesson_bars(lesson)
    assert [bar["title"] for bar in bars] == list(TITLES.values())
    for bar in bars:
        assert sum(bar["measured"].values()) == pytest.approx(1)
    assert [len(bar["published"]) for bar in bars] == [0, 4, 0, 4, 1]


def test_every_row_has_the_measured_and_the_published_values(lesson: Lesson) -> None:
    rows = lesson_rows(lesson)
    assert len(rows) == len(ROWS)
    assert all(cell for row in rows for cell in row["measured"])
    published = {row["label"]: row["published"] for row in rows if row["published"]}
    assert published["KV slots: token states, %"] == ["", "20.4", "", "26.8", "96.3"]
    file = io.StringIO()
    Console(file=file, width=80).print(lesson_table(lesson))
    assert max(map(len, file.getvalue().splitlines())) <= 80
    assert file.getvalue().count("  published") == len(published)
    assert "…" not in file.getvalue()


def test_the_reasons_have_the_numbers_of_the_runs(lesson: Lesson) -> None:
    speed, latency, memory = map(str, lesson_reasons(lesson))
    assert f"which gives {lesson_values(lesson, 'paged')['speedup']:.2f}" in speed
    assert "time in the queue" in latency
    assert "simulated with 40 requests" in memory


def test_the_reason_of_memory_names_a_pool_that_is_never_full(small_lesson: Lesson) -> None:
    assert "where none waited" in str(lesson_reasons(small_lesson)[-1])


@pytest.mark.parametrize(
    "arguments", [["--num-requests", "31"], ["--num-requests", "1001"], ["--seed", "-1"], ["--max-tokens", "161"]]
)
def test_the_command_checks_its_options(arguments: list[str]) -> None:
    found = invoke(["lesson", *arguments])
    assert found.exit_code == 2
    assert arguments[0] in found.output
