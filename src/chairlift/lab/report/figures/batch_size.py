"""The figure of throughput and latency by batch size, with the limit that memory sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, PercentFormatter

from chairlift.lab.report.compare import BatchSizePoint, batch_size_point, group_by, has_several
from chairlift.lab.report.figures import drawing
from chairlift.lab.report.figures.drawing import Drawing, OmittedFigure
from chairlift.lab.report.run_log import RecordedRun

KEY, TITLE = "batch-size", "Effects of the batch size"
Value = Callable[[BatchSizePoint], float | None]

PANELS: dict[str, Value] = {
    "output tokens/s": lambda point: point.output_tokens_per_s,
    "time of a decode step (ITL)": lambda point: point.decode_step_time,
    "weights read for an output token": lambda point: point.weight_bytes_per_token,
    "KV memory held": lambda point: point.kv_use,
}


def draw(runs: Sequence[RecordedRun]) -> Drawing | OmittedFigure:
    groups = {
        policy: of_policy
        for policy, of_policy in group_by(runs, lambda run: run.policy).items()
        if has_several(of_policy, _size)
    }
    if not groups:
        return OmittedFigure(
            KEY,
            TITLE,
            "needs at least two runs of one policy with a different --static-batch-size (static) or --max-num-seqs.",
        )
    figure = Figure(figsize=(drawing.WIDTH, 4.6))
    panels = figure.subplots(2, 2, sharex=True).ravel()
    for index, (policy, of_policy) in enumerate(groups.items()):
        points = sorted((batch_size_point(run) for run in of_policy), key=lambda point: point.batch_size)
        for axes, value in zip(panels, PANELS.values(), strict=True):
            _draw_points(axes, points, value, index, policy)
    for axes, title in zip(panels, PANELS, strict=True):
        axes.set(title=title, xscale="log")
        drawing.start_at_zero(axes)
        axes.grid(True, color="#DDDDDD", linewidth=0.5)
    _scale(figure, panels, {run.num_seats for of_policy in groups.values() for run in of_policy})
    return Drawing(KEY, TITLE, CAPTION, figure)


CAPTION = (
    "Each point is a run with that number of seats. A step reads all weights once, so more rows compute more tokens "
    "for the same bytes, until arithmetic or memory is the limit. The vertical line is the memory limit: the number of "
    "requests that fit in the pool under that policy at their mean memory. Hollow points are runs that never filled "
    "their seats. The time of a decode step is the median of the steps without a prefill, which is the ITL of streams."
)


def _size(run: RecordedRun) -> int:
    return run.num_seats


def _draw_points(axes: Axes, points: Sequence[BatchSizePoint], value: Value, index: int, policy: str) -> None:
    known = [(point, y) for point in points if (y := value(point)) is not None]
    if not known:
        return
    style = drawing.point_style(index)
    axes.plot([point.batch_size for point, _ in known], [y for _, y in known], label=policy, linewidth=1.2, **style)
    hollow = [(point.batch_size, y) for point, y in known if point.peak < point.batch_size]
    if hollow:
        axes.plot(*zip(*hollow, strict=True), **{**style, "linestyle": "none"}, markerfacecolor="white")
    if (limit := _memory_limit(points)) is not None:
        axes.axvline(limit, linewidth=1, alpha=0.8, **drawing.line_style(index))


def _memory_limit(points: Sequence[BatchSizePoint]) -> float | None:
    """The memory limit of the run with the most seats; None outside the range of the figure."""
    limit = points[-1].memory_limit
    return limit if limit is not None and limit <= 4 * points[-1].batch_size else None


def _scale(figure: Figure, panels: Sequence[Axes], sizes: set[int]) -> None:
    panels[1].yaxis.set_major_formatter(EngFormatter(unit="s", sep=""))
    panels[2].yaxis.set_major_formatter(EngFormatter(unit="B", sep=""))
    panels[3].yaxis.set_major_formatter(PercentFormatter(1))
    for axes in panels[2:]:
        axes.set_xlabel("seats (static_batch_size or max_num_seqs)")
        axes.set_xticks(sorted(sizes), labels=[str(size) for size in sorted(sizes)])
        axes.minorticks_off()
    limit = Line2D([], [], color=drawing.GREY, marker="|", markersize=11, linestyle="none", label="memory limit")
    drawing.lines_above(figure, panels[0], limit)
