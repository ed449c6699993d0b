"""Checks the pictures of runs and the map of their memory."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from benchmarks.batch_picture import lane_cells
from benchmarks.drawing import ROW_FILLS, STYLE, save_picture
from benchmarks.memory_map import (
    FREE,
    ROUNDING,
    SHARED,
    BlockSpan,
    block_spans,
    draw,
    num_shown_blocks,
    paint,
    rounding_spans,
    shared_spans,
)
from benchmarks.row_phases import RowKind
from benchmarks.run_pictures import PICTURES, draw_pictures, main
from hypothesis import given, settings
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from recorded_runs import GeneratedRun, recorded_runs, started_of, steps_of
from simulated_runs import simulated, static

from chairlift.core.baselines.arena import power_of_two_above
from chairlift.events import EngineStarted, Step
from chairlift.lab.report.recorded_run import RecordedRun, recorded_run, trace_events
from chairlift.observability.event_log import encode_event


@pytest.fixture(scope="module")
def runs() -> list[RecordedRun]:
    """Runs of two lengths, two batch sizes and two policies, and with a lack of memory."""
    return [
        recorded_run(static(4, kv="max"), "s4"),
        recorded_run(static(8, kv="max", output="fixed:9"), "s8"),
        recorded_run(simulated(num_blocks=24), "paged"),
        recorded_run(simulated(kv="pow2", rate=2.0), "pow2"),
    ]


@pytest.fixture(scope="module")
def pictures(runs: list[RecordedRun]) -> dict[str, Figure]:
    return draw_pictures(runs)


def picture(name: str, *runs: RecordedRun) -> Figure:
    return draw_pictures(runs)[name]


def test_each_run_has_a_panel_in_the_pictures_over_time(runs: list[RecordedRun], pictures: dict[str, Figure]) -> None:
    for name in PICTURES:
        titles = [axes.get_title(loc="left") + axes.get_title() for axes in pictures[name].axes]
        assert [title.partition(":")[0] for title in titles] == [run.label for run in runs]


def test_steps_replace_time_if_the_clock_does_not_move() -> None:
    events = [replace(e, time=0.0, scheduled_time=0.0) if isinstance(e, Step) else e for e in simulated(6)]
    assert picture("compare-batch", recorded_run(events)).axes[-1].get_xlabel() == "steps since the run began"


def colours_of(figure: Figure) -> np.ndarray[Any, Any]:
    """The colour of each pixel as one number."""
    file = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(file, format="png", dpi=100)
    file.seek(0)
    rgb = (imread(file)[..., :3] * 255).round().astype(int)
    return np.asarray((rgb << [16, 8, 0]).sum(axis=2))


def share_of(pixels: np.ndarray[Any, Any], colour: str) -> float:
    rgb = [round(255 * part) for part in to_rgb(colour)]
    return float((pixels == (rgb[0] << 16 | rgb[1] << 8 | rgb[2])).mean())


@pytest.fixture(scope="module")
def big() -> RecordedRun:
    return recorded_run(
        simulated(2000, "exp:30,1..40", max_num_seqs=32, max_num_batched_tokens=256, num_blocks=512), "big"
    )


def test_pictures_stay_small_with_two_thousand_requests(big: RecordedRun, tmp_path: Path) -> None:
    assert big.metrics.num_answered == 2000
    for name, drawn in draw_pictures([big]).items():
        path = tmp_path / f"{name}.png"
        save_picture(drawn, path)
        assert path.stat().st_size < 300_000


def test_every_legend_entry_is_visible(big: RecordedRun, runs: list[RecordedRun]) -> None:
    """Cells and images are drawn above their background."""
    many, few = (colours_of(picture("compare-batch", run)) for run in (big, runs[0]))
    assert share_of(many, ROW_FILLS[RowKind.DECODE].colour) > 0.3
    seconds = dict.fromkeys(RowKind, 0.0)
    for cell in lane_cells(runs[0].trace):
        seconds[cell.kind] += cell.end - cell.start
    decode = share_of(few, ROW_FILLS[RowKind.DECODE].colour)
    for kind in (RowKind.PREFILL, RowKind.PADDING):
        shown = share_of(few, ROW_FILLS[kind].colour) / decode
        assert shown == pytest.approx(seconds[kind] / seconds[RowKind.DECODE], rel=0.3)


def test_the_script_writes_the_same_pictures_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "a=b.jsonl"
    log.write_bytes(b"".join(encode_event(event) + b"\n" for event in simulated(6)))
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        main([f"paged={log}", "--output", str(folder)])
    written = [folder / f"{name}.png" for folder in (first, second) for name in PICTURES]
    assert capsys.readouterr().out.split() == list(map(str, written))
    assert [path.read_bytes() for path in first.iterdir()] == [
        (second / path.name).read_bytes() for path in first.iterdir()
    ]


@settings(max_examples=80, deadline=None)
@given(recorded_runs())
def test_spans_are_the_tables(run: GeneratedRun) -> None:
    steps = steps_of(run)
    trace = trace_events(run.events)
    names = [request.arrived.request_id for request in trace.requests]
    spans, found = block_spans(trace), [Counter[tuple[int, str]]() for _ in steps]
    assert all(a.first <= b.first for a, b in pairwise(spans))
    for span in spans:
        for position in range(span.first, span.last + 1):
            found[position].update((block, names[span.request]) for block in _blocks(span))
    assert found == [
        Counter((block, name) for name, holder in holders.items() for block in holder.block_ids)
        for holders in run.holders
    ]


@settings(max_examples=80, deadline=None)
@given(recorded_runs())
def test_shared_spans_are_blocks_with_several_holders(run: GeneratedRun) -> None:
    steps = steps_of(run)
    found: list[set[int]] = [set() for _ in steps]
    for span in shared_spans(block_spans(trace_events(run.events))):
        for position in range(span.first, span.last + 1):
            found[position].update(_blocks(span))
    expected = []
    for holders in run.holders:
        counts = Counter(block for holder in holders.values() for block in holder.block_ids)
        expected.append({block for block, count in counts.items() if count > 1})
    assert found == expected
    block_size = started_of(run).block_size
    assert [len(blocks) * block_size for blocks in found] == [step.shared for step in steps]


@settings(max_examples=60, deadline=None)
@given(recorded_runs())
def test_rounding_spans_are_the_extra_blocks_of_the_buddy_arena(run: GeneratedRun) -> None:
    steps_of(run)
    trace = trace_events(run.events)
    lost = [0] * len(run.holders)
    for span in rounding_spans(trace):
        assert span.block + span.num_blocks <= trace.started.num_blocks
        for position in range(span.first, span.last + 1):
            lost[position] += span.num_blocks
    is_buddy = trace.started.kv_arena == "buddy"
    assert lost == [
        sum(power_of_two_above(len(h.block_ids)) - len(h.block_ids) for h in holders.values()) if is_buddy else 0
        for holders in run.holders
    ]


def _blocks(span: BlockSpan) -> range:
    return range(span.block, span.block + span.num_blocks)


def test_the_map_shows_owners_rounding_sharing_and_free_blocks() -> None:
    assert set(np.unique(paint(recorded_run(simulated(6))))) == {0, 1, 2, 3, 4, 5, FREE}
    assert ROUNDING in paint(recorded_run(simulated(6, kv="pow2")))
    shared = simulated(6, max_tokens=None)
    first = next(event for event in shared if isinstance(event, Step))
    names = first.request_ids[:2]
    blocks = {**first.new_blocks, names[1]: first.new_blocks[names[0]]}
    events = [replace(e, new_blocks=blocks, shared=4) if e is first else e for e in shared]
    assert SHARED in paint(recorded_run(events))


def test_the_map_of_a_large_pool_shows_only_the_used_blocks() -> None:
    size = recorded_run(simulated(6)).started.num_blocks
    events = [replace(e, num_blocks=10 * size) if isinstance(e, EngineStarted) else e for e in simulated(6)]
    large = recorded_run(events)
    used = num_shown_blocks(large)
    assert size / 2 < used <= size == num_shown_blocks(recorded_run(simulated(6)))
    (axes,) = draw([large]).axes
    assert axes.get_ylim() == (0, used)
    assert f"{10 * size:,} blocks of" in axes.get_title(loc="left") + axes.get_title()
    assert (paint(large) != FREE).mean() > 0.2
