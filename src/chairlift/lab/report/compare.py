"""Compares runs: the points of figures in which each run is a point or a bar."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev

import numpy as np

from chairlift.lab.metrics.percentile import percentile
from chairlift.lab.report.memory import KINDS, kind_shares
from chairlift.lab.report.run_log import RecordedRun
from chairlift.lab.report.trace import RowKind

CDF_POINTS = 200


def cdf(values: Sequence[float], num_points: int = CDF_POINTS) -> tuple[list[float], list[float]]:
    """The points of a cumulative distribution: values in ascending order, and the share of values at most as large.

    With more than `num_points` values, the points are percentiles.
    """
    ordered = sorted(values)
    if len(values) <= num_points:
        return [ordered[0], *ordered], [rank / len(values) for rank in range(len(values) + 1)]
    shares = [index / (num_points - 1) for index in range(num_points)]
    return [percentile(ordered, 100 * share) for share in shares], shares


@dataclass(frozen=True, slots=True)
class WasteShares:
    """The mean shares of the pool by kind, over the steps with waiting requests if `is_saturated`, else over all."""

    shares: dict[str, float]
    is_saturated: bool


def waste_shares(run: RecordedRun) -> WasteShares:
    """The mean shares over the steps with waiting requests, because memory that no request needs is not wasted; over
    all steps if no request waited."""
    assert run.kinds is not None
    trace = run.trace
    weights = trace.held_ends() - trace.starts
    waited = np.array([step.num_waiting > 0 for step in trace.steps])
    is_saturated = bool((weights * waited).sum() > 0)
    if is_saturated:
        weights = weights * waited
    if not weights.sum():
        weights = np.ones(len(weights))
    shares = np.average(kind_shares(run.kinds), axis=0, weights=weights)
    return WasteShares(dict(zip(KINDS, shares.tolist(), strict=True)), is_saturated)


def variation(values: Sequence[float]) -> float | None:
    """The coefficient of variation: standard deviation divided by mean; None without values."""
    if not values or not (mean := fmean(values)):
        return None
    return pstdev(values) / mean


def group_by(runs: Sequence[RecordedRun], key: Callable[[RecordedRun], str]) -> dict[str, list[RecordedRun]]:
    """The runs grouped by `key`, in the order of the first run of each group."""
    groups: dict[str, list[RecordedRun]] = defaultdict(list)
    for run in runs:
        groups[key(run)].append(run)
    return dict(groups)


@dataclass(frozen=True, slots=True)
class BatchSizePoint:
    """The batch size of one run and its effects.

    Attributes:
        batch_size: the number of seats; peak: the largest batch; mean: the mean number of rows over time.
        decode_step_time: median seconds of the steps without a prefill, which are the ITL; None without such steps.
        weight_bytes_per_token: bytes of weights read from memory for each output token; None if not in the log.
        kv_use: mean share of the pool that requests hold.
        memory_limit: number of requests that fit in the pool at the mean memory of a request; None without any.
    """

    batch_size: int
    peak: int
    mean: float
    output_tokens_per_s: float
    decode_step_time: float | None
    weight_bytes_per_token: float | None
    kv_use: float
    memory_limit: float | None


def batch_size_point(run: RecordedRun) -> BatchSizePoint:
    trace, metrics = run.trace, run.metrics
    times = trace.ends - trace.starts
    weights = times if times.sum() else np.ones(len(times))
    held = np.array([trace.started.num_blocks - step.free_blocks for step in trace.steps]) * trace.started.block_size
    rows = np.array([len(step.request_ids) for step in trace.steps])
    mean_held, mean_rows = float(np.average(held, weights=weights)), float(np.average(rows, weights=weights))
    decode_times = times[~prefill_steps(run)]
    read = trace.started.weight_bytes * len(trace.steps)
    return BatchSizePoint(
        batch_size=run.num_seats,
        peak=metrics.peak_batch_size,
        mean=mean_rows,
        output_tokens_per_s=metrics.output_tokens_per_s,
        decode_step_time=median(decode_times.tolist()) if len(decode_times) else None,
        weight_bytes_per_token=read / metrics.output_tokens if read and metrics.output_tokens else None,
        kv_use=mean_held / trace.num_slots,
        memory_limit=trace.num_slots * mean_rows / mean_held if mean_held else None,
    )


def prefill_steps(run: RecordedRun) -> np.typing.NDArray[np.bool_]:
    """[steps]: whether a row of the step was in prefill."""
    is_prefill = np.zeros(len(run.trace.steps), dtype=np.bool_)
    for residency in run.trace.residencies:
        for phase in residency.phases:
            if phase.kind is RowKind.PREFILL:
                is_prefill[phase.first : phase.last + 1] = True
    return is_prefill


def has_several(runs: Sequence[RecordedRun], value: Callable[[RecordedRun], float | int | None]) -> bool:
    """Whether the runs have at least two different values."""
    return len({v for run in runs if (v := value(run)) is not None}) > 1
