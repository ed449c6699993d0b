"""The figure of throughput by the variance of output lengths."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.lab.report.compare import group_by, has_several, variation
from chairlift.lab.report.figures.drawing import Drawing, OmittedFigure, figure_of, point_style, start_at_zero
from chairlift.lab.report.run_log import RecordedRun, default_label

KEY, TITLE = "variance", "Throughput against variance of output lengths"


def draw(runs: Sequence[RecordedRun]) -> Drawing | OmittedFigure:
    if not has_several(runs, _variation):
        return OmittedFigure(
            KEY,
            TITLE,
            "needs at least two runs whose output lengths vary differently, such as --output-len fixed:64 and exp:64.",
        )
    figure, (axes,) = figure_of(1, 3.0)
    groups = group_by(runs, lambda run: f"{default_label(run.started)}, {run.arrivals}")
    for index, (name, of_group) in enumerate(groups.items()):
        points = sorted(
            (cv, run.metrics.output_tokens_per_s) for run in of_group if (cv := _variation(run)) is not None
        )
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.2, clip_on=False, **point_style(index))
    axes.set(xlabel="coefficient of variation of output lengths (standard deviation / mean)", ylabel="output tokens/s")
    axes.set_xlim(left=0)
    start_at_zero(axes)
    axes.legend()
    caption = (
        "Each point is a run. A static batch waits for its longest member, so its throughput falls with the variance "
        "of lengths; continuous batching refills seats at every step and is hardly affected. Runs are comparable if "
        "they have the same mean lengths, model and machine."
    )
    return Drawing(KEY, TITLE, caption, figure)


def _variation(run: RecordedRun) -> float | None:
    value = variation(run.output_lengths)
    return None if value is None else round(value, 2)
