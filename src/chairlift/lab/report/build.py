"""Draws the figures of a report, and writes the page: one HTML document for the screen and for printing."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

import jinja2
import matplotlib as mpl

from chairlift import __version__
from chairlift.errors import ConfigError
from chairlift.lab.report.figures import batch, batch_size, device, kinds, latency, memory_map, variance, waste
from chairlift.lab.report.figures.drawing import STYLE, Drawing, OmittedFigure
from chairlift.lab.report.run_log import RecordedRun
from chairlift.lab.report.tables import SECTIONS

DOTS_PER_INCH = 160
RUNS_A_TABLE = 4
LONG_NUMBER = re.compile(r"(\d+\.\d\d)\d+")
"""A coordinate with more than two decimals."""

FIGURES = (batch, device, memory_map, kinds, waste, variance, latency, batch_size)
"""The modules of the figures, in the order of the page."""


def draw_all(runs: Sequence[RecordedRun]) -> list[Drawing | OmittedFigure]:
    """Draw every figure of the report, in order."""
    with mpl.rc_context(STYLE):
        return [figure.draw(runs) for figure in FIGURES]


def svg_of(drawing: Drawing) -> str:
    """A figure as an SVG element whose ids are unique on the page."""
    file = io.StringIO()
    with mpl.rc_context(STYLE):
        drawing.figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    element = text[text.index("<svg") :]
    element = re.sub(r' d="[^"]*"', lambda path: LONG_NUMBER.sub(r"\1", path.group()), element)
    element = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{drawing.key}-", element)
    label = escape(drawing.title, quote=True)
    return element.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def render(title: str, runs: Sequence[RecordedRun], parts: Sequence[Drawing | OmittedFigure]) -> str:
    """The HTML document: contents, a table of the runs, and each figure with its caption, or why it is omitted."""
    loader = jinja2.PackageLoader("chairlift.lab.report", "")
    pages = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    return pages.get_template("page.html.jinja").render(
        title=title,
        runs=runs,
        parts=parts,
        sections=SECTIONS,
        runs_a_table=RUNS_A_TABLE,
        svg_of=svg_of,
        version=__version__,
    )


def write_report(runs: Sequence[RecordedRun], output: Path, title: str | None = None, png: bool = False) -> list[Path]:
    """Draw the runs and write the page; returns the written files, the page first.

    Args:
        png: write each figure next to the page too, as STEM-FIGURE.png.

    Raises:
        ConfigError: a file cannot be written.
    """
    parts = draw_all(runs)
    page = render(title or default_title(runs), runs, parts)
    written = [output]
    try:
        output.write_text(page, encoding="utf-8")
        for drawing in [part for part in parts if png and isinstance(part, Drawing)]:
            written.append(output.with_name(f"{output.stem}-{drawing.key}.png"))
            with mpl.rc_context(STYLE):
                drawing.figure.savefig(written[-1], dpi=DOTS_PER_INCH, metadata={"Software": None})
    except OSError as error:
        raise ConfigError(f"output {written[-1]} cannot be written: {error.strerror or error}") from None
    return written


def default_title(runs: Sequence[RecordedRun]) -> str:
    """A title with the runs and models, such as "static(8)/max and continuous/paged on smollm2-135m-instruct"."""
    labels = [run.label for run in runs]
    models = list(dict.fromkeys(run.started.model for run in runs))
    what = f"{len(runs)} runs" if len(runs) > 3 else ", ".join(labels[:-1]) + " and " * (len(runs) > 1) + labels[-1]
    return f"{what} on {', '.join(models)}"
