"""The table of the lesson: measured values beside the published ones, and why they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any, Final, NamedTuple

from rich.table import Table

from chairlift.events import SLOT_KINDS
from chairlift.lab.bench.machine import machine_caption
from chairlift.lab.lesson.runs import POLICIES, TITLES, VOCAB_SIZE, Lesson
from chairlift.lab.metrics.run import ReportedMetric
from chairlift.lab.tables import make_table, number

NUM_SIMULATED: Final = 400
"""Number of requests of the simulation that shows the influence of the number of requests."""

NAIVE_SHARE: Final = 210_750 / 66_942
"""The part of Anyscale's factor that comes from decoding each static batch to the longest output of all requests."""


class Message(NamedTuple):
    """A text with the values of its placeholders, so that the page can translate it."""

    text: str
    values: Mapping[str, object] = {}

    def __str__(self) -> str:
        return self.text.format(**self.values)


class LessonRow(NamedTuple):
    """One row of the table, with the published values by policy as text."""

    metric: ReportedMetric
    published: Mapping[str, str] = {}


ROWS: Final = (
    LessonRow(ReportedMetric("output_tokens_per_s", "throughput: output tokens", "/s")),
    LessonRow(
        ReportedMetric("speedup", "throughput relative to static", "", decimals=2),
        {"static": "1", "exact": "about 8", "paged": "23.4"},
    ),
    LessonRow(ReportedMetric("e2e_latency_p50", "median latency", "s")),
    LessonRow(ReportedMetric("e2e_latency_p99", "P99 latency", "s")),
    LessonRow(
        ReportedMetric("mean_batch_size", "seats in use, mean", "", decimals=1),
        {"max": "7.0", "pow2": "9.8", "paged": "30.4"},
    ),
    LessonRow(ReportedMetric("mean_busy_seats", "seats with work, mean", "", decimals=1)),
    LessonRow(
        ReportedMetric("token_states", "KV slots: token states", "%", 100, 1),
        {"max": "20.4", "pow2": "26.8", "paged": "96.3"},
    ),
    LessonRow(ReportedMetric("reserved", "KV slots: reserved", "%", 100, 1), {"max": "13.3", "pow2": "17.9"}),
    LessonRow(
        ReportedMetric("internal", "KV slots: internal fragmentation", "%", 100, 1), {"max": "57.3", "pow2": "13.6"}
    ),
    LessonRow(
        ReportedMetric("external", "KV slots: external fragmentation", "%", 100, 1), {"max": "8.9", "pow2": "41.6"}
    ),
    LessonRow(ReportedMetric("free", "KV slots: free", "%", 100, 1)),
    LessonRow(
        ReportedMetric("waste", "KV slots: wasted", "%", 100, 1),
        {"max": "60-80", "pow2": "60-80", "paged": "under 4"},
    ),
)
RESERVED: Final = (
    "static: batches of {batch}, which fit. A request reserves max_model_len (static, max); its prompt and "
    "max_tokens={max_tokens}, or a longer answer (exact); its output rounded up to a power of two (pow2); "
    "nothing (paged)"
)
SOURCES: Final = (
    "Kwon et al., SOSP'23, Figures 2 and 13a; throughput: Daniel et al., Anyscale, 2023, whose TGI and Ray Serve "
    "reserve max_tokens"
)


def lesson_values(lesson: Lesson, policy: str) -> dict[str, float]:
    """The values of the rows for a policy, unscaled."""
    values = {key: value for key, value in lesson.values(policy).items() if value is not None}
    speedup = lesson.result.ratio(policy, "output_tokens_per_s")
    return values | {"speedup": 0.0 if speedup is None else speedup.median}


def lesson_rows(lesson: Lesson) -> list[dict[str, Any]]:
    """The rows of the table with their cells as text, measured and published, in the order of the policies."""
    values = {policy.name: lesson_values(lesson, policy.name) for policy in POLICIES}
    return [
        {
            "label": metric.heading,
            "measured": [metric.cell(of_policy.get(metric.key)) for of_policy in values.values()],
            "published": [published.get(name, "") for name in values] if published else [],
        }
        for metric, published in ROWS
    ]


def lesson_bars(lesson: Lesson) -> list[dict[str, Any]]:
    """The shares of the kinds of slots under each policy, measured and published; a published share may be unknown."""
    published = {row.metric.key: row.published for row in ROWS}
    return [
        {
            "title": TITLES[policy.name],
            "measured": {kind: lesson.values(policy.name)[kind] for kind in SLOT_KINDS},
            "published": {
                kind: float(published[kind][policy.name]) / 100 for kind in SLOT_KINDS if policy.name in published[kind]
            },
        }
        for policy in POLICIES
    ]


def lesson_table(lesson: Lesson) -> Table:
    """The table for the terminal, with a line of published values under each line that has some."""
    result = lesson.result
    batch, declared = lesson.runs["static"].metrics.peak_batch_size, lesson.options.max_tokens
    machine = machine_caption(result.machine, result.peak_rss_bytes)
    caption = f"{machine}\n{RESERVED.format(batch=batch, max_tokens=declared)}\npublished: {SOURCES}"
    table = make_table(result.title, ["", *(policy.name for policy in POLICIES)], caption)
    for row in lesson_rows(lesson):
        table.add_row(row["label"], *row["measured"])
        if row["published"]:
            table.add_row("  published", *row["published"], style="dim")
    return table


def lesson_load(lesson: Lesson) -> Message:
    """The model and the requests."""
    run = lesson.values("static")
    counts = {key: f"{run[key]:,}" for key in ("num_requests", "prompt_tokens", "output_tokens")}
    text = "{model}: {num_requests} requests at once, {prompt_tokens} prompt and {output_tokens} output tokens"
    return Message(text, {"model": lesson.started.model, **counts})


def lesson_machine(lesson: Lesson) -> Message:
    """The machine, the memory of the process, and the versions."""
    machine = lesson.result.machine
    sizes = {"memory": machine.memory_bytes >> 30, "peak": f"{(lesson.result.peak_rss_bytes or 0) >> 20:,}"}
    text = (
        "{cpu}, {num_threads} threads on {num_cores} cores, {memory} GiB, peak RSS {peak} MiB; chairlift {chairlift}, "
        "torch {torch}, Python {python}"
    )
    return Message(text, asdict(machine) | sizes)


def lesson_reasons(lesson: Lesson) -> list[Message]:
    """Why the values differ from the published ones, with the numbers of these runs."""
    return [_speed_reason(lesson), _latency_reason(lesson), _memory_reason(lesson)]


def _speed_reason(lesson: Lesson) -> Message:
    static, paged = (lesson_values(lesson, name) for name in ("static", "paged"))
    tokens = [run["output_tokens"] / run["num_steps"] for run in (static, paged)]
    seconds = [run["duration"] / run["num_steps"] for run in (static, paged)]
    more, longer = tokens[1] / tokens[0], seconds[1] / seconds[0]
    text = (
        "Throughput: a paged step has {more} times the output tokens ({paged_tokens} instead of {static_tokens}) and "
        "takes {longer} times as long ({paged_ms} ms instead of {static_ms}), which gives {ratio}. On the published "
        "GPU a step with more tokens takes hardly longer, because it is limited by reading the weights; on this CPU "
        "each token costs time. The published 23.4 also contains a factor of {naive}, because its static batches were "
        "all decoded to the longest answer of all 1,000 requests; here a batch ends with its own longest answer."
    )
    values = {"more": more, "longer": longer, "static_tokens": tokens[0], "paged_tokens": tokens[1]}
    values |= {"static_ms": 1e3 * seconds[0], "paged_ms": 1e3 * seconds[1]}
    factors = {"ratio": f"{more / longer:.2f}", "naive": f"{NAIVE_SHARE:.2f}"}
    return Message(text, {name: number(value) for name, value in values.items()} | factors)


def _latency_reason(lesson: Lesson) -> Message:
    def share(policy: str) -> str:
        requests = lesson.runs[policy].requests
        return f"{fmean((each.queue_time or 0.0) / (each.e2e_latency or 1.0) for each in requests):.0%}"

    text = (
        "Latency: all requests arrive at once, so it is mostly time in the queue: {static} of it with static batches, "
        "{paged} with paging. The article measured a lower median with requests that arrive one by one."
    )
    return Message(text, {"static": share("static"), "paged": share("paged")})


def _memory_reason(lesson: Lesson) -> Message:
    workload = replace(lesson.options, num_prompts=NUM_SIMULATED).workload(VOCAB_SIZE, token_round=1)
    simulated = {
        policy.name: lesson.simulate(policy, workload).waste().shares["token_states"] for policy in POLICIES[1:]
    }
    paged = lesson.runs["paged"].trace.steps
    num_waiting = sum(step.num_waiting > 0 for step in paged)
    waited = "the steps in which requests waited, {num_waiting} of {num_steps} with paging"
    steps = Message(waited, {"num_waiting": num_waiting, "num_steps": len(paged)})
    text = (
        "Memory: the shares are means over {steps}, and include those in which the pool fills. The same scheduler, "
        "simulated with {num_requests} requests of these lengths, has these shares of token states: {shares}."
    )
    values = {
        "steps": steps if num_waiting else Message("all steps with paging, where none waited"),
        "num_requests": NUM_SIMULATED,
        "shares": ", ".join(f"{share:.1%} ({name})" for name, share in simulated.items()),
    }
    return Message(text, values)
