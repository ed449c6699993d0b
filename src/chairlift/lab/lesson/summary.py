"""The table of the lesson: measured values beside the published ones, and why they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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


def lesson_reasons(lesson: Lesson) -> list[str]:
    """Why the values differ from the published ones, with the numbers of these runs."""
    return [_speed_reason(lesson), _latency_reason(lesson), _memory_reason(lesson)]


def _speed_reason(lesson: Lesson) -> str:
    static, paged = (lesson_values(lesson, name) for name in ("static", "paged"))
    tokens = [run["output_tokens"] / run["num_steps"] for run in (static, paged)]
    seconds = [run["duration"] / run["num_steps"] for run in (static, paged)]
    more, longer = tokens[1] / tokens[0], seconds[1] / seconds[0]
    return (
        f"Throughput: a paged step has {number(more)} times the output tokens ({number(tokens[1])} instead of "
        f"{number(tokens[0])}) and takes {number(longer)} times as long ({number(1e3 * seconds[1])} ms instead of "
        f"{number(1e3 * seconds[0])}), which gives {more / longer:.2f}. On the published GPU a step with more tokens "
        f"takes hardly longer, because it is limited by reading the weights; on this CPU each token costs time. The "
        f"published 23.4 also contains a factor of {NAIVE_SHARE:.2f}, because its static batches were all decoded to "
        f"the longest answer of all 1,000 requests; here a batch ends with its own longest answer."
    )


def _latency_reason(lesson: Lesson) -> str:
    shares = [
        fmean((request.queue_time or 0.0) / (request.e2e_latency or 1.0) for request in lesson.runs[name].requests)
        for name in ("static", "paged")
    ]
    return (
        f"Latency: all requests arrive at once, so it is mostly time in the queue: {shares[0]:.0%} of it with static "
        f"batches, {shares[1]:.0%} with paging. The article measured a lower median with requests that arrive one by "
        f"one."
    )


def _memory_reason(lesson: Lesson) -> str:
    workload = replace(lesson.options, num_prompts=NUM_SIMULATED).workload(VOCAB_SIZE, token_round=1)
    simulated = {
        policy.name: lesson.simulate(policy, workload).waste().shares["token_states"] for policy in POLICIES[1:]
    }
    paged = lesson.runs["paged"].trace.steps
    num_waiting = sum(step.num_waiting > 0 for step in paged)
    counted = f"the steps in which requests waited, {num_waiting} of {len(paged)} with paging"
    return (
        f"Memory: the shares are means over {counted if num_waiting else 'all steps with paging, where none waited'}, "
        f"and include those in which the pool fills. The same scheduler, simulated with {NUM_SIMULATED} requests of "
        f"these lengths, has "
        + ", ".join(f"{share:.1%} token states ({name})" for name, share in simulated.items())
        + "."
    )
