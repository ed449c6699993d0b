"""The page of a report: one self-contained HTML document, for the screen and for printing."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files

import matplotlib as mpl

from chairlift import __version__
from chairlift.lab.report.figures.drawing import STYLE, Drawing, OmittedFigure
from chairlift.lab.report.run_log import RecordedRun
from chairlift.lab.report.tables import SECTIONS

RUNS_A_TABLE = 4
LONG_NUMBER = re.compile(r"(\d+\.\d\d)\d+")
"""A coordinate with more than two decimals."""

CSS = "\n" + files("chairlift.lab.report").joinpath("page.css").read_text(encoding="utf-8")


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


def render(title: str, runs: Sequence[RecordedRun], parts: Iterable[Drawing | OmittedFigure]) -> str:
    """The HTML document: contents, a table of the runs, and each figure with its caption, or why it is omitted."""
    parts = list(parts)
    lines = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>",
        f"<h1>{escape(title)}</h1>",
        *_contents(parts),
        '<main>\n<section id="runs">\n<h2>The runs</h2>',
        *_tables(runs),
        "</section>",
        *(line for part in parts for line in _section(part)),
        "</main>",
        f"<footer>Drawn by Chairlift {escape(__version__)} from event logs; published numbers are marked.</footer>",
        "</body>\n</html>\n",
    ]
    return "\n".join(lines)


def _contents(parts: Iterable[Drawing | OmittedFigure]) -> Iterator[str]:
    yield '<nav aria-label="Contents">\n<ol>\n<li><a href="#runs">The runs</a></li>'
    for part in parts:
        missing = " (left out)" if isinstance(part, OmittedFigure) else ""
        yield f'<li><a href="#{part.key}">{escape(part.title)}</a>{missing}</li>'
    yield "</ol>\n</nav>"


def _section(part: Drawing | OmittedFigure) -> Iterator[str]:
    yield f'<section id="{part.key}">\n<h2>{escape(part.title)}</h2>'
    if isinstance(part, Drawing):
        yield f"<figure>\n{svg_of(part)}\n<figcaption>{escape(part.caption)}</figcaption>\n</figure>"
    else:
        yield f'<p class="left-out">Left out: {escape(part.reason)}</p>'
    yield "</section>"


def _tables(runs: Sequence[RecordedRun]) -> Iterator[str]:
    for start in range(0, len(runs), RUNS_A_TABLE):
        yield '<div class="scroll">'
        yield from _table(runs[start : start + RUNS_A_TABLE])
        yield "</div>"


def _table(runs: Sequence[RecordedRun]) -> Iterator[str]:
    heads = "".join(f'<th scope="col">{escape(run.label)}</th>' for run in runs)
    yield f"<table>\n<thead><tr><th></th>{heads}</tr></thead>\n<tbody>"
    for section, rows in SECTIONS.items():
        yield f'<tr><th class="section" colspan="{len(runs) + 1}">{escape(section)}</th></tr>'
        for label, value in rows.items():
            cells = "".join(f"<td>{escape(value(run))}</td>" for run in runs)
            yield f'<tr><th scope="row">{escape(label)}</th>{cells}</tr>'
    yield "</tbody>\n</table>"
