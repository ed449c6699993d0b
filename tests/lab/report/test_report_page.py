"""Checks the page of a report and its figures."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from matplotlib.text import Text

from chairlift.config import SchedulerConfig
from chairlift.events import EngineStarted, Event, EventList, Step
from chairlift.lab.report.build import default_title, draw_all, render, svg_of, write_report
from chairlift.lab.report.figures.batch import lane_cells
from chairlift.lab.report.figures.drawing import KIND_FILLS, ROW_FILLS, STYLE, Drawing, OmittedFigure
from chairlift.lab.report.figures.memory_map import FREE, ROUNDING, SHARED, num_shown_blocks, paint
from chairlift.lab.report.run_log import RecordedRun, recorded_run
from chairlift.lab.report.trace import RowKind
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.synthetic import make_workload

VOID = {"meta", "br", "link", "img"}
KEYS = ["batch", "device", "memory-map", "memory-kinds", "waste", "variance", "latency", "batch-size"]


class Linear:
    """A cost model with a constant for the weights and a cost for each token."""

    def seconds(self, shape: Any) -> float:
        return 0.02 + 0.001 * shape.num_tokens

    def constants(self) -> list[tuple[str, str]]:
        return []


def simulated(
    num_requests: int = 24,
    output: str = "uniform:2..30",
    *,
    kv: str = "paged",
    num_blocks: int = 64,
    max_tokens: str | None = "fixed:40",
    rate: float | None = None,
    **limits: Any,
) -> list[Event]:
    """Events of a simulated run."""
    declared = None if max_tokens is None else parse_lengths(max_tokens)
    workload = make_workload(
        0, num_requests, parse_lengths("uniform:4..20"), parse_lengths(output), ArrivalProcess(rate), 100,
        max_tokens=declared,
    )  # fmt: skip
    scheduler = SchedulerConfig(64, **{"max_num_seqs": 8, "max_num_batched_tokens": 32, **limits})
    log = EventList()
    simulate(workload, SimConfig(scheduler, num_blocks, block_size=4, kv=kv), Linear(), log)
    return log.events


def static(size: int, **options: Any) -> list[Event]:
    return simulated(batching="static", static_batch_size=size, **options)


@pytest.fixture(scope="module")
def runs() -> list[RecordedRun]:
    """Runs for all figures: two lengths, two batch sizes, two policies, and a lack of memory."""
    return [
        recorded_run(static(4, kv="max"), "s4"),
        recorded_run(static(8, kv="max", output="fixed:9"), "s8"),
        recorded_run(simulated(num_blocks=24), "paged"),
        recorded_run(simulated(kv="pow2", rate=2.0), "pow2"),
    ]


@pytest.fixture(scope="module")
def parts(runs: list[RecordedRun]) -> list[Drawing | OmittedFigure]:
    return draw_all(runs)


class Reader(HTMLParser):
    """A parser that checks that elements are closed in order, and keeps ids, links and some texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.references: set[str] = set()
        self.headings: list[str] = []
        self.captions: list[str] = []
        self.num_figures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.num_figures += tag == "svg"
        for name, value in attrs:
            if name == "id" and value:
                self.ids[value] += 1
            elif name in ("href", "xlink:href", "src") and value:
                self.references.add(value)
            self.references.update(re.findall(r"url\(([^)]*)\)", value or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        elif self.open and self.open[-1] == "figcaption":
            self.captions.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_has_every_figure_and_nothing_from_elsewhere(
    runs: list[RecordedRun], parts: list[Drawing | OmittedFigure]
) -> None:
    assert [part.key for part in parts] == KEYS
    assert all(isinstance(part, Drawing) for part in parts), [p.reason for p in parts if isinstance(p, OmittedFigure)]
    page = render("A & B", runs, parts)
    reader = read(page)
    assert reader.num_figures == len(reader.captions) == len(KEYS)
    assert reader.headings == ["The runs", *(part.title for part in parts)]
    assert reader.ids.keys() >= {"runs", *KEYS}
    assert [name for name, count in reader.ids.items() if count > 1] == []
    inside = {reference[1:] for reference in reader.references if reference.startswith("#")}
    assert inside <= reader.ids.keys()
    assert all(r.startswith(("#", "data:image/png;base64,")) for r in reader.references)
    assert "<script" not in page
    assert "@import" not in page


def test_the_table_has_every_run(runs: list[RecordedRun]) -> None:
    page = render("t", [*runs, *runs], [])
    assert page.count("<table>") == 2
    for run in runs:
        assert page.count(f'<th scope="col">{run.label}</th>') == 2
        assert f"<td>{run.metrics.num_answered} answered</td>" in page
    rows = re.findall(r'<th scope="row">ITL p50 / p99</th>((?:<td>[^<]*</td>)+)', page)
    cells = re.findall(r"<td>([^<]*)</td>", rows[0])
    assert [cell == "none" for cell in cells] == [True, True, False, False]


def test_text_has_a_minimum_size(parts: list[Drawing | OmittedFigure]) -> None:
    for part in parts:
        assert isinstance(part, Drawing)
        sizes = {text.get_fontsize() for text in part.figure.findobj(Text) if text.get_text()}  # type: ignore[attr-defined]
        assert min(sizes) >= 8, part.key


def test_labels_are_escaped() -> None:
    run = recorded_run(simulated(4), "<b>&")
    page = render("<i>", [run], draw_all([run]))
    read(page)
    assert "<b>&" not in page
    assert "<i>" not in page


def without_memory(events: Sequence[Event]) -> list[Event]:
    """The events without kinds of slots, as in version 1 of the schema."""
    none = {"token_states": 0, "reserved": 0, "internal": 0, "external": 0, "free": 0, "new_blocks": {}}
    return [replace(event, **none) if isinstance(event, Step) else event for event in events]  # type: ignore[arg-type]


def test_figures_without_data_are_omitted_with_a_reason() -> None:
    run = recorded_run(without_memory(simulated(6)), "old")
    assert run.kinds is None
    parts = draw_all([run])
    left_out = {part.key: part.reason for part in parts if isinstance(part, OmittedFigure)}
    assert left_out.keys() == {"memory-map", "memory-kinds", "waste", "variance", "batch-size"}
    assert "schema version 1" in left_out["waste"]
    assert "vary differently" in left_out["variance"]
    assert "--max-num-seqs" in left_out["batch-size"]
    page = render("old", [run], parts)
    assert read(page).num_figures == 3
    assert page.count("Left out: ") == 5


def test_runs_without_memory_are_named_beside_the_others(runs: list[RecordedRun]) -> None:
    parts = draw_all([runs[0], recorded_run(without_memory(simulated(6)), "old")])
    captions = {part.key: part.caption for part in parts if isinstance(part, Drawing)}
    assert "Runs without kinds of slots in their logs: old." in captions["waste"]
    assert "Runs without kinds of slots in their logs: old." in captions["memory-kinds"]


def test_runs_that_are_not_drawn_over_time_are_counted() -> None:
    events = simulated(4)
    parts = draw_all([recorded_run(events, str(index)) for index in range(8)])
    assert isinstance(parts[0], Drawing)
    assert parts[0].caption.endswith("Shown are the first 6 of 8 runs.")
    assert len(parts[0].figure.axes) == 6


def test_steps_replace_time_if_the_clock_does_not_move() -> None:
    events = [replace(e, time=0.0, scheduled_time=0.0) if isinstance(e, Step) else e for e in simulated(6)]
    parts = draw_all([recorded_run(events)])
    assert isinstance(parts[0], Drawing)
    assert parts[0].figure.axes[-1].get_xlabel() == "steps since the run began"
    assert isinstance(parts[KEYS.index("latency")], OmittedFigure)


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
    drawing = next(part for part in draw_all([large]) if part.key == "memory-map")
    assert isinstance(drawing, Drawing)
    (axes,) = drawing.figure.axes
    assert axes.get_ylim() == (0, used)
    assert f"{10 * size:,} blocks of" in axes.get_title(loc="left") + axes.get_title()
    assert (paint(large) != FREE).mean() > 0.2


def test_itl_is_in_milliseconds_and_no_labels_of_ticks_overlap() -> None:
    drawing = next(part for part in draw_all([recorded_run(simulated(30))]) if part.key == "latency")
    assert isinstance(drawing, Drawing)
    assert [axes.get_xlabel() for axes in drawing.figure.axes] == ["seconds", "milliseconds", "seconds"]
    drawing.figure.draw_without_rendering()
    for axes in drawing.figure.axes:
        low, high = axes.get_xlim()
        labels = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
        boxes = sorted((label.get_window_extent() for label in labels if label.get_text()), key=lambda box: box.x0)
        assert all(a.x1 < b.x0 for a, b in pairwise(boxes))
        assert boxes


def colours_of(drawing: Drawing) -> np.ndarray[Any, Any]:
    """The colour of each pixel as one number."""
    file = io.BytesIO()
    with mpl.rc_context(STYLE):
        drawing.figure.savefig(file, format="png", dpi=100)
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


def test_two_thousand_requests_stay_small(big: RecordedRun, tmp_path: Path) -> None:
    assert big.metrics.num_answered == 2000
    parts = draw_all([big])
    for part in parts:
        if isinstance(part, Drawing):
            assert len(svg_of(part)) < 600_000, part.key
    write_report([big], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 2_000_000


def test_every_legend_entry_is_visible(big: RecordedRun, runs: list[RecordedRun]) -> None:
    """Cells and images are drawn above their background."""
    batch = [draw_all([run])[0] for run in (big, runs[0])]
    assert isinstance(batch[0], Drawing)
    assert isinstance(batch[1], Drawing)
    many, few = colours_of(batch[0]), colours_of(batch[1])
    assert share_of(many, ROW_FILLS[RowKind.DECODE].colour) > 0.3
    seconds = dict.fromkeys(RowKind, 0.0)
    for cell in lane_cells(runs[0].trace):
        seconds[cell.kind] += cell.end - cell.start
    decode = share_of(few, ROW_FILLS[RowKind.DECODE].colour)
    for kind in (RowKind.PREFILL, RowKind.PADDING):
        shown = share_of(few, ROW_FILLS[kind].colour) / decode
        assert shown == pytest.approx(seconds[kind] / seconds[RowKind.DECODE], rel=0.3)


def test_kinds_fill_their_share(runs: list[RecordedRun]) -> None:
    drawing = draw_all(runs[:1])[KEYS.index("memory-kinds")]
    assert isinstance(drawing, Drawing)
    pixels = colours_of(drawing)
    internal, used = (share_of(pixels, KIND_FILLS[kind].colour) for kind in ("internal", "token_states"))
    slots = np.average(np.array(runs[0].kinds), axis=0, weights=runs[0].trace.ends - runs[0].trace.starts)
    hatched = 0.4
    assert slots[2] / slots[0] * (1 - hatched) < internal / used < slots[2] / slots[0]


def test_a_figure_is_the_same_each_time(runs: list[RecordedRun]) -> None:
    first, second = (draw_all(runs[:1]) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        if isinstance(one, Drawing) and isinstance(other, Drawing):
            assert svg_of(one) == svg_of(other)


def test_titles_name_a_few_runs_and_count_many(runs: list[RecordedRun]) -> None:
    assert default_title(runs[:1]) == "s4 on none"
    assert default_title(runs[:3]) == "s4, s8 and paged on none"
    assert default_title(runs) == "4 runs on none"
