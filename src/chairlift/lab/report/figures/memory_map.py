"""The figure of the owners of KV blocks over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from chairlift.lab.report.figures import drawing
from chairlift.lab.report.figures.drawing import Drawing, Fill, OmittedFigure
from chairlift.lab.report.memory import BlockSpan, block_spans, owner_colours, rounding_spans, shared_spans
from chairlift.lab.report.run_log import RecordedRun

COLUMNS, MAX_ROWS = 1400, 500
TITLE = "KV memory by owner"
FREE, ROUNDING, SHARED = len(drawing.OWNERS), len(drawing.OWNERS) + 1, len(drawing.OWNERS) + 2
KEYS = (
    Fill("free", drawing.PALE),
    Fill("lost to rounding", drawing.GREY),
    Fill("shared by several requests", drawing.BLACK),
)
COLOURS = np.array([to_rgb(colour) for colour in (*drawing.OWNERS, drawing.PALE, drawing.GREY, drawing.BLACK)])


def draw(runs: Sequence[RecordedRun]) -> Drawing | OmittedFigure:
    holding = [run for run in runs if any(step.new_blocks for step in run.trace.steps)]
    if not holding:
        return OmittedFigure("memory-map", TITLE, drawing.NO_KINDS)
    shown, duration, note = drawing.over_time(holding)
    figure, panels = drawing.figure_of(len(shown), 1.75 * len(shown) + 0.6)
    for axes, run in zip(panels, shown, strict=True):
        _draw_run(axes, run, duration)
    panels[-1].set_xlabel(f"{drawing.time_label(shown)} since the run began")
    _legend(figure)
    caption = (
        "The vertical axis is the block id; blocks above those that were ever used are not shown if they are more than "
        "half of the pool. A colour is a request; colours repeat, but differ between neighbours. "
        "Blocks are freed when their request finishes or is preempted; in a static batch, when the batch ends. "
        "Reservations are bands with full height from the beginning; paging allocates one block after another. Grey "
        f"blocks are unused: the buddy allocator rounds reservations up.{note}"
    )
    return Drawing("memory-map", TITLE, caption, figure)


def _legend(figure: Figure) -> None:
    owners = tuple(Patch(facecolor=colour) for colour in drawing.OWNERS)
    keys: list[Any] = [owners, *(fill.patch() for fill in KEYS)]
    figure.legend(
        keys,
        ["held: one colour per request", *(fill.label for fill in KEYS)],
        loc="outside upper left",
        ncols=len(KEYS) + 1,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        handlelength=2.6,
    )


def _draw_run(axes: Axes, run: RecordedRun, duration: float) -> None:
    num_blocks = num_shown_blocks(run)
    colours = COLOURS[paint(run)]
    image = (colours * 255).astype(np.uint8)
    axes.imshow(
        image, extent=(0, run.trace.duration, 0, num_blocks), origin="lower", aspect="auto", interpolation="none"
    )
    axes.set(xlim=(0, duration), ylim=(0, num_blocks), ylabel="block")
    slots = f"{run.started.num_blocks:,} blocks of {run.started.block_size} slots"
    unused = "" if num_blocks == run.started.num_blocks else f", of which the first {num_blocks:,} were used"
    axes.set_title(f"{run.label}: {slots}{unused}")


def num_shown_blocks(run: RecordedRun) -> int:
    """The number of blocks on the axis: the whole pool, or the used part if it is smaller than half of the pool."""
    spans = [*block_spans(run.trace), *rounding_spans(run.trace)]
    used = max(span.block + span.num_blocks for span in spans)
    return used if used < run.started.num_blocks / 2 else run.started.num_blocks


def paint(run: RecordedRun) -> npt.NDArray[np.intp]:
    """The image of the pool as [rows, columns] of indexes of COLOURS."""
    trace = run.trace
    num_blocks = num_shown_blocks(run)
    num_rows = min(num_blocks, MAX_ROWS)
    canvas = np.full((num_rows, COLUMNS), FREE)
    scale = COLUMNS / trace.duration
    columns = (trace.starts * scale).astype(int).tolist(), (trace.held_ends() * scale).round().astype(int).tolist()
    spans = block_spans(trace)
    owners = owner_colours(spans, num_blocks, len(drawing.OWNERS))
    for span in rounding_spans(trace):
        _fill(canvas, columns, num_rows / num_blocks, span, ROUNDING)
    for span in spans:
        _fill(canvas, columns, num_rows / num_blocks, span, owners[span.request])
    if any(step.shared for step in trace.steps):
        for span in shared_spans(spans):
            _fill(canvas, columns, num_rows / num_blocks, span, SHARED)
    return canvas


def _fill(
    canvas: npt.NDArray[np.intp],
    columns: tuple[list[int], list[int]],
    rows_per_block: float,
    span: BlockSpan,
    colour: int,
) -> None:
    """Paint a span with at least one pixel."""
    top, bottom = int(span.block * rows_per_block), int((span.block + span.num_blocks) * rows_per_block)
    left, right = columns[0][span.first], columns[1][span.last]
    canvas[top : max(bottom, top + 1), left : max(right, left + 1)] = colour
