"""Checks the pictures of runs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from simulated_runs import simulated, static

from chairlift.errors import ConfigError
from chairlift.events import Event, Step
from chairlift.lab.report.batch_picture import lane_cells
from chairlift.lab.report.drawing import KIND_FILLS, ROW_FILLS, STYLE, NothingToDraw
from chairlift.lab.report.pictures import PICTURES, draw_pictures, write_pictures
from chairlift.lab.report.run_log import RecordedRun, recorded_run
from chairlift.lab.report.trace import RowKind


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
    return {name: figure_of(picture) for name, picture in draw_pictures(runs).items()}


def figure_of(picture: Figure | NothingToDraw) -> Figure:
    assert isinstance(picture, Figure), picture
    return picture


def picture(name: str, *runs: RecordedRun) -> Figure:
    return figure_of(draw_pictures(runs)[name])


def test_each_run_has_a_panel_in_the_pictures_over_time(runs: list[RecordedRun], pictures: dict[str, Figure]) -> None:
    assert pictures.keys() == PICTURES.keys() == {"batch", "memory", "latency"}
    for name in ("batch", "memory"):
        titles = [axes.get_title(loc="left") + axes.get_title() for axes in pictures[name].axes]
        assert [title.partition(":")[0] for title in titles] == [run.label for run in runs]
    assert [len(axes.lines) for axes in pictures["latency"].axes] == [4, 2, 4], "static batches have no ITL"


def test_text_has_a_minimum_size(pictures: dict[str, Figure]) -> None:
    for name, figure in pictures.items():
        sizes = {text.get_fontsize() for text in figure.findobj(Text) if text.get_text()}  # type: ignore[attr-defined]
        assert min(sizes) >= 8, name


def without_memory(events: Sequence[Event]) -> list[Event]:
    """The events without kinds of slots, as in version 1 of the schema."""
    none = {"token_states": 0, "reserved": 0, "internal": 0, "external": 0, "free": 0, "new_blocks": {}}
    return [replace(event, **none) if isinstance(event, Step) else event for event in events]  # type: ignore[arg-type]


def test_a_picture_without_data_is_omitted_with_a_reason(tmp_path: Path) -> None:
    run = recorded_run(without_memory(simulated(6)), "old")
    assert run.kinds is None
    written = write_pictures([run], tmp_path)
    assert {path.name for path, omitted in written.items() if omitted is None} == {"batch.png", "latency.png"}
    assert "no kinds of KV slots" in str(written[tmp_path / "memory.png"])
    assert not (tmp_path / "memory.png").exists()


def test_runs_without_memory_are_left_out_of_its_picture(runs: list[RecordedRun]) -> None:
    assert len(picture("memory", runs[0], recorded_run(without_memory(simulated(6)), "old")).axes) == 1


def test_the_number_of_runs_is_limited(tmp_path: Path) -> None:
    events = simulated(4)
    with pytest.raises(ConfigError, match="at most 6 runs, got 7"):
        write_pictures([recorded_run(events, str(index)) for index in range(7)], tmp_path)


def test_steps_replace_time_if_the_clock_does_not_move() -> None:
    events = [replace(e, time=0.0, scheduled_time=0.0) if isinstance(e, Step) else e for e in simulated(6)]
    drawn = draw_pictures([recorded_run(events)])
    assert figure_of(drawn["batch"]).axes[-1].get_xlabel() == "steps since the run began"
    assert isinstance(drawn["latency"], NothingToDraw)


def test_itl_is_in_milliseconds_and_no_labels_of_ticks_overlap() -> None:
    figure = picture("latency", recorded_run(simulated(30)))
    assert [axes.get_xlabel() for axes in figure.axes] == ["seconds", "milliseconds", "seconds"]
    figure.draw_without_rendering()
    for axes in figure.axes:
        low, high = axes.get_xlim()
        labels = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
        boxes = sorted((label.get_window_extent() for label in labels if label.get_text()), key=lambda box: box.x0)
        assert all(a.x1 < b.x0 for a, b in pairwise(boxes))
        assert boxes


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


def test_pictures_of_two_thousand_requests_stay_small(big: RecordedRun, tmp_path: Path) -> None:
    assert big.metrics.num_answered == 2000
    for path in write_pictures([big], tmp_path):
        assert path.stat().st_size < 300_000


def test_every_legend_entry_is_visible(big: RecordedRun, runs: list[RecordedRun]) -> None:
    """Cells and images are drawn above their background."""
    many, few = (colours_of(picture("batch", run)) for run in (big, runs[0]))
    assert share_of(many, ROW_FILLS[RowKind.DECODE].colour) > 0.3
    seconds = dict.fromkeys(RowKind, 0.0)
    for cell in lane_cells(runs[0].trace):
        seconds[cell.kind] += cell.end - cell.start
    decode = share_of(few, ROW_FILLS[RowKind.DECODE].colour)
    for kind in (RowKind.PREFILL, RowKind.PADDING):
        shown = share_of(few, ROW_FILLS[kind].colour) / decode
        assert shown == pytest.approx(seconds[kind] / seconds[RowKind.DECODE], rel=0.3)


def test_kinds_fill_their_share(runs: list[RecordedRun]) -> None:
    pixels = colours_of(picture("memory", runs[0]))
    internal, used = (share_of(pixels, KIND_FILLS[kind].colour) for kind in ("internal", "token_states"))
    slots = np.average(np.array(runs[0].kinds), axis=0, weights=runs[0].trace.ends - runs[0].trace.starts)
    hatched = 0.4
    assert slots[2] / slots[0] * (1 - hatched) < internal / used < slots[2] / slots[0]


def test_a_picture_is_the_same_each_time(runs: list[RecordedRun], tmp_path: Path) -> None:
    first, second = (write_pictures(runs[:1], tmp_path / name) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
