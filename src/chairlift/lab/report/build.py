"""Draws the figures of a report and writes its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from chairlift.errors import ConfigError
from chairlift.lab.report.figures import batch, batch_size, device, kinds, latency, memory_map, variance, waste
from chairlift.lab.report.figures.drawing import STYLE, Drawing, OmittedFigure
from chairlift.lab.report.page import render
from chairlift.lab.report.run_log import RecordedRun

DOTS_PER_INCH = 160
FIGURES = (batch, device, memory_map, kinds, waste, variance, latency, batch_size)
"""The modules of the figures, in the order of the page."""


def draw_all(runs: Sequence[RecordedRun]) -> list[Drawing | OmittedFigure]:
    """Draw every figure of the report, in order."""
    with mpl.rc_context(STYLE):
        return [figure.draw(runs) for figure in FIGURES]


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
