"""The picture of the owners of KV blocks over time, which docs/policies shows for each policy of KV memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from benchmarks.drawing import Fill, panels_over_time
from docs.palette import colour
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from benchmarks import drawing
from chairlift.lab.report.recorded_run import RecordedRun, Residency, RunTrace

COLUMNS, MAX_ROWS = 1400, 500
OWNERS: Final = tuple(colour(f"owner-{index}") for index in range(8))
FREE, ROUNDING, SHARED = len(OWNERS), len(OWNERS) + 1, len(OWNERS) + 2
KEYS: Final = (
    drawing.KIND_FILLS["free"],
    Fill("lost to rounding", drawing.KIND_FILLS["external"].colour),
    Fill("shared by several requests", drawing.BLACK),
)
COLOURS: Final = np.array([to_rgb(colour) for colour in (*OWNERS, *(key.colour for key in KEYS))])


def draw(runs: Sequence[RecordedRun]) -> Figure:
    """Draw the owner of each block of the pool of each run over time.

    A colour is a request; colours repeat, but differ between neighbours. Blocks above those that were ever used are
    not shown if they are more than half of the pool. Grey blocks are unused, because the buddy allocator rounds
    reservations up.
    """
    figure, panels, duration = panels_over_time(runs, [1.75] * len(runs), 0.6)
    for axes, run in zip(panels, runs, strict=True):
        _draw_run(axes, run, duration)
    _draw_legend(figure)
    return figure


def _draw_legend(figure: Figure) -> None:
    owners = tuple(Patch(facecolor=colour) for colour in OWNERS)
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
    owners = owner_colours(spans, num_blocks, len(OWNERS))
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


class BlockSpan(NamedTuple):
    """Consecutive blocks that one request holds in consecutive steps (positions in `RunTrace.steps`, both included)."""

    block: int
    num_blocks: int
    first: int
    last: int
    request: int


def block_spans(trace: RunTrace) -> list[BlockSpan]:
    """The blocks that each request holds, ordered by the step of their allocation, including shared blocks."""
    spans = [
        BlockSpan(block, count, position, last, residency.request.index)
        for residency in trace.residencies
        for releases in [_blocks_by_step(trace, residency, "released_blocks")]
        for position, block_ids in _blocks_by_step(trace, residency, "new_blocks")
        for last, held in _by_last_step(residency, releases, position, block_ids).items()
        for block, count in _runs(held)
    ]
    return sorted(spans, key=lambda span: span.first)


def _blocks_by_step(trace: RunTrace, residency: Residency, field: str) -> list[tuple[int, list[int]]]:
    """The position of each step in which a request received or released blocks, and their ids."""
    steps = enumerate(trace.steps[residency.first : residency.last + 1], start=residency.first)
    found = ((position, getattr(step, field).get(residency.request.request_id)) for position, step in steps)
    return [(position, block_ids) for position, block_ids in found if block_ids is not None]


def _by_last_step(
    residency: Residency, releases: Iterable[tuple[int, list[int]]], position: int, block_ids: Sequence[int]
) -> dict[int, list[int]]:
    """The blocks that a request received in a step, by the last step in which it held them."""
    ends: dict[int, int] = {}
    for released_at, released in releases:
        if released_at > position:
            for block_id in released:
                ends.setdefault(block_id, released_at - 1)
    held: dict[int, list[int]] = defaultdict(list)
    for block_id in block_ids:
        held[ends.get(block_id, residency.last)].append(block_id)
    return held


def _runs(block_ids: Iterable[int]) -> list[tuple[int, int]]:
    """(first id, count) of each range of consecutive ids."""
    runs = []
    for _, group in groupby(enumerate(sorted(block_ids)), key=lambda item: item[1] - item[0]):
        members = [block for _, block in group]
        runs.append((members[0], len(members)))
    return runs


def shared_spans(spans: Iterable[BlockSpan]) -> list[BlockSpan]:
    """The spans in which several requests hold a block, one block each; `request` is the last one to share it."""
    held: dict[int, list[BlockSpan]] = defaultdict(list)
    for span in spans:
        for block in range(span.block, span.block + span.num_blocks):
            held[block].append(span)
    shared = []
    for block, holders in held.items():
        until = -1
        for span in holders:
            if span.first <= until:
                shared.append(BlockSpan(block, 1, span.first, min(span.last, until), span.request))
            until = max(until, span.last)
    return shared


def rounding_spans(trace: RunTrace) -> list[BlockSpan]:
    """The blocks that the buddy allocator adds to round up a reservation."""
    if trace.started.kv_arena != "buddy":
        return []
    spans = []
    for span in block_spans(trace):
        lost = (1 << (span.num_blocks - 1).bit_length()) - span.num_blocks
        if lost:
            spans.append(span._replace(block=span.block + span.num_blocks, num_blocks=lost))
    return spans


def owner_colours(spans: Iterable[BlockSpan], num_blocks: int, num_colours: int) -> dict[int, int]:
    """A colour for each request: the one that is rarest among the neighbours and previous owners of its first blocks.
    Of several such colours it is the least recently used one.

    Args:
        spans: the blocks of requests, ordered by `first`.
    """
    colour_of_block = np.full(num_blocks + 2, num_colours)
    colours: dict[int, int] = {}
    last_used = list(range(num_colours))
    for turn, span in enumerate(spans, start=num_colours):
        around = colour_of_block[span.block : span.block + span.num_blocks + 2]
        if span.request not in colours:
            seen = np.bincount(around, minlength=num_colours)
            colour = min(range(num_colours), key=lambda c: (seen[c], last_used[c]))
            colours[span.request] = colour
            last_used[colour] = turn
        around[1:-1] = colours[span.request]
    return colours
