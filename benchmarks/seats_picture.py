"""Draws one lane for each seat over the steps of an engine as SVG: the whole run, and below it an enlarged part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from docs.palette import WORDS, colour

KINDS: Final = {"prefill": "prefill", "decode": "decode", "end": "finished", "empty": "cell-empty"}
"""The name in the palette of the pages of each kind of cell."""

COLOURS: Final = {kind: colour(name) for kind, name in KINDS.items()}
LEGEND: Final = {kind: WORDS[name] for kind, name in KINDS.items()}
LEFT, RIGHT, WIDTH = 52, 20, 1000
PLOT_WIDTH: Final = WIDTH - LEFT - RIGHT
LANE, LANE_GAP, FRAME = 13, 2, 3
FIRST_LANE, BETWEEN_PANELS, BELOW = 86, 84, 50
STEPS_BEFORE, STEPS_AFTER = 10, 14
STYLE: Final = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#333}"
    ".title{font-size:17px;font-weight:600}.small{fill:#666;font-size:12px}.label{fill:#fff;font-size:11px}"
    ".middle{text-anchor:middle}.right{text-anchor:end}"
    ".grid{stroke:#fff}.tick{stroke:#999}.frame{fill:none;stroke:#444;stroke-width:1.5}.funnel{fill:#444;fill-opacity:.07}"
    + "".join(f".{kind}{{fill:{colour}}}" for kind, colour in COLOURS.items())
)


class Cell(NamedTuple):
    """`length` consecutive steps of a seat that have the same kind, one of COLOURS."""

    seat: int
    step: int
    length: int
    kind: str


@dataclass(frozen=True, slots=True)
class Panel:
    """The lanes over the steps `first` to `last`, both included. Their upper edge is at `top`."""

    num_seats: int
    first: int
    last: int
    top: int

    @property
    def step_width(self) -> float:
        return PLOT_WIDTH / (self.last + 1 - self.first)

    @property
    def bottom(self) -> int:
        return self.y(self.num_seats) - LANE_GAP

    def x(self, step: float) -> float:
        return LEFT + (step - self.first) * self.step_width

    def y(self, seat: int) -> int:
        return self.top + seat * (LANE + LANE_GAP)

    def lanes(self, cells: Sequence[Cell]) -> Iterator[str]:
        for seat in range(self.num_seats):
            yield _rect("empty", LEFT, self.y(seat), PLOT_WIDTH, LANE)
        for cell in cells:
            start, stop = max(cell.step, self.first), min(cell.step + cell.length, self.last + 1)
            if start < stop:
                yield _rect(cell.kind, self.x(start), self.y(cell.seat), (stop - start) * self.step_width, LANE)

    def grid(self) -> Iterator[str]:
        """Draw lines between the steps."""
        for step in range(self.first + 1, self.last + 1):
            yield _line("grid", self.x(step), self.top, self.bottom)

    def axes(self, tick_every: int) -> Iterator[str]:
        """Draw the ticks, each in the middle of its step."""
        for step in range(-(-self.first // tick_every) * tick_every, self.last + 1, tick_every):
            x = self.x(step + 0.5)
            yield _line("tick", x, self.bottom + 4, self.bottom + 8)
            yield _text("small middle", x, self.bottom + 20, str(step))
        for seat in range(0, self.num_seats, 5):
            yield _text("small right", LEFT - 7, self.y(seat) + LANE - 2, str(seat))
        middle = (self.top + self.bottom) / 2
        yield f'<text class="middle" transform="translate(16 {middle:g}) rotate(-90)">seat</text>'
        yield _text("right", LEFT + PLOT_WIDTH, self.bottom + 38, "step of the engine")


@dataclass(frozen=True, slots=True)
class Picture:
    """The content of the picture. The lower panel shows `enlarged`, one of `cells`, with `label` and the steps around
    it."""

    cells: Sequence[Cell]
    num_seats: int
    num_steps: int
    title: str
    subtitle: str
    enlarged: Cell
    label: str

    def draw(self) -> str:
        """The SVG document."""
        whole = Panel(self.num_seats, 0, self.num_steps - 1, FIRST_LANE)
        first = max(0, self.enlarged.step - STEPS_BEFORE)
        last = min(whole.last, self.enlarged.step + self.enlarged.length + STEPS_AFTER)
        part = Panel(self.num_seats, first, last, whole.bottom + BETWEEN_PANELS)
        height = part.bottom + BELOW
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(self.title)}</title><desc>{escape(self.subtitle)}</desc><style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
            _text("title", LEFT, 26, self.title),
            _text("small", LEFT, 46, self.subtitle),
            *_legend(70),
            '<g shape-rendering="crispEdges">',
            _funnel(whole, part),
            *whole.lanes(self.cells),
            *part.lanes(self.cells),
            *part.grid(),
            *_frames(whole, part),
            *whole.axes(50),
            *part.axes(5),
            *self._label(part),
            "</g>",
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def _label(self, part: Panel) -> Iterator[str]:
        start = part.x(self.enlarged.step)
        end = part.x(self.enlarged.step + self.enlarged.length)
        y = part.y(self.enlarged.seat)
        yield _rect(self.enlarged.kind, start, y, end - start, LANE)
        yield _text("label middle", (start + end) / 2, y + LANE - 3, self.label)


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.6g}" y="{y:g}" width="{width:.6g}" height="{height:g}"/>'


def _line(kind: str, x: float, top: float, bottom: float) -> str:
    return f'<path class="{kind}" d="M{x:.6g} {top:g}V{bottom:g}"/>'


def _text(kind: str, x: float, y: float, text: str) -> str:
    return f'<text class="{kind}" x="{x:.6g}" y="{y:g}">{escape(text)}</text>'


def _legend(y: float) -> Iterator[str]:
    x = float(LEFT)
    for kind, name in LEGEND.items():
        yield _rect(kind, x, y - 10, 22, 12)
        yield _text("name", x + 28, y, name)
        x += 56 + 6.6 * len(name)


def _funnel(whole: Panel, part: Panel) -> str:
    """Draw the area that connects the steps in the upper panel with their enlargement."""
    upper, lower = whole.bottom + FRAME, part.top - FRAME
    left, right = whole.x(part.first), whole.x(part.last + 1)
    path = f"M{left:.6g} {upper}H{right:.6g}L{LEFT + PLOT_WIDTH} {lower}H{LEFT}Z"
    return f'<path class="funnel" d="{path}"/>'


def _frames(whole: Panel, part: Panel) -> Iterator[str]:
    for panel in (whole, part):
        left, right = panel.x(part.first), panel.x(part.last + 1)
        yield _rect("frame", left - 1, panel.top - FRAME, right - left + 2, panel.bottom - panel.top + 2 * FRAME)
