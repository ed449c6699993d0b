"""`chairlift lesson`: from static batching to PagedAttention, measured on the default model."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import RenderableType

from chairlift.cli.console import prepare_engine


def lesson(
    *,
    seed: Annotated[int, Parameter(validator=Number(gte=0), help="Seed of the lengths and tokens of requests.")] = 0,
    num_requests: Annotated[
        int, Parameter(validator=Number(gte=32, lte=1000), help="Number of requests. Fewer are faster.")
    ] = 96,
) -> None:
    """Serve the same requests in static batches, with reservations and with paging, and compare them."""
    prepare_engine()
    if sys.stderr.isatty():
        logging.getLogger("chairlift").setLevel(logging.WARNING)
    from chairlift.lab.lesson.progress import LessonProgress

    with LessonProgress("load the model") as progress:
        from chairlift.lab.lesson.runs import TITLES, VOCAB_SIZE, lesson_config, lesson_options, run_lesson
        from chairlift.lab.lesson.summary import lesson_reasons, lesson_table
        from chairlift.lab.tables import print_parts

        options = lesson_options(seed, num_requests)
        num_tokens = sum(item.output_len for item in options.workload(VOCAB_SIZE, token_round=1))
        progress.expect_runs(TITLES.values(), num_tokens)
        measured = run_lesson(lesson_config(), options, progress)
        progress.start_phase("simulate")
        parts: list[RenderableType] = [lesson_table(measured), measured.tokens.describe(), *lesson_reasons(measured)]
    print_parts(parts)
    if not measured.tokens.is_sound:
        raise SystemExit(1)
