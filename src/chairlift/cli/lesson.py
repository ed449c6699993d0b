"""`chairlift lesson`: from static batching to PagedAttention, measured on the default model."""

from __future__ import annotations

import logging
import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from chairlift.cli.console import prepare_engine
from chairlift.server.web.page_language import Language
from chairlift.system.output_files import check_writable


def lesson(
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"), help="File for the page, which replaces it.")] = Path(
        "lesson.html"
    ),
    seed: Annotated[int, Parameter(validator=Number(gte=0), help="Seed of the lengths and tokens of requests.")] = 0,
    num_requests: Annotated[
        int, Parameter(validator=Number(gte=32, lte=1000), help="Number of requests. Fewer are faster.")
    ] = 80,
    max_tokens: Annotated[
        int,
        Parameter(
            validator=Number(gte=1, lte=160),
            help="Declared by requests, and reserved under exact. Longer answers declare their length.",
        ),
    ] = 112,
    lang: Annotated[Language | None, Parameter(help="Language of the page. Default: that of the browser.")] = None,
) -> None:
    """Serve the same requests in static batches, with reservations and with paging, and write a page that shows it."""
    check_writable("output", output)
    prepare_engine()
    if sys.stderr.isatty():
        logging.getLogger("chairlift").setLevel(logging.WARNING)
    from chairlift.engine.progress import progress_bar

    with progress_bar("load torch and the engine", 1):
        from chairlift.lab.bench.simulation import ProgressSink
        from chairlift.lab.lesson.page import write_page
        from chairlift.lab.lesson.page_data import num_results, page_data
        from chairlift.lab.lesson.runs import POLICIES, RemainingTime, lesson_config, lesson_options, run_lesson
        from chairlift.lab.lesson.summary import lesson_table
        from chairlift.lab.tables import print_parts
    options = lesson_options(seed, num_requests, max_tokens)
    remaining = RemainingTime(options, num_results(), print_estimate)
    with progress_bar(f"serve requests under {len(POLICIES)} policies", len(POLICIES) * num_requests) as advance:
        measured = run_lesson(lesson_config(), options, ProgressSink(advance), remaining)
    with progress_bar("simulate positions of the sliders", num_results()) as advance:
        data = page_data(measured, advance)
    write_page(data, output, lang)
    print_parts(
        [lesson_table(measured), measured.tokens.describe(), *map(str, data["reasons"]), f"page: {output.resolve()}"]
    )
    if can_open_browser():
        webbrowser.open(output.resolve().as_uri())
    if not measured.tokens.is_sound:
        raise SystemExit(1)


def print_estimate(seconds: float) -> None:
    """Print about how long the rest of the lesson takes; a progress bar stays below the line."""
    print(f"the first policy is served; about {seconds:.0f} s remain", file=sys.stderr)


def can_open_browser() -> bool:
    """Whether the terminal belongs to a desktop, so that a browser opens beside it and not in it."""
    has_desktop = sys.platform != "linux" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    return has_desktop and sys.stdout.isatty()
