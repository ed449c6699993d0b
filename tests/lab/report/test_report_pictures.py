"""Checks the pictures of runs."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from benchmarks.batch_picture import lane_cells
from benchmarks.drawing import KIND_FILLS, ROW_FILLS, STYLE, save_picture
from benchmarks.row_phases import RowKind
from benchmarks.run_pictures import PICTURES, draw_pictures, main
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from simulated_runs import simulated, static

from chairlift.events import Step
from chairlift.lab.report.recorded_run import RecordedRun, kind_shares, recorded_run
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


def test_text_has_a_minimum_size(pictures: dict[str, Figure]) -> None:
    for name, figure in pictures.items():
        sizes = {text.get_fontsize() for text in figure.findobj(Text) if text.get_text()}  # type: ignore[attr-defined]
        assert min(sizes) >= 8, name


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


def test_kinds_fill_their_share(runs: list[RecordedRun]) -> None:
    pixels = colours_of(picture("compare-memory-kinds", runs[0]))
    internal, used = (share_of(pixels, KIND_FILLS[kind].colour) for kind in ("internal", "token_states"))
    slots = np.average(kind_shares(runs[0].true_steps), axis=0, weights=runs[0].trace.ends - runs[0].trace.starts)
    hatched = 0.4
    assert slots[2] / slots[0] * (1 - hatched) < internal / used < slots[2] / slots[0]


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
