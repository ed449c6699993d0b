"""`chairlift batch`: answers a file of requests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from chairlift.cli.console import check_model, prepare_engine
from chairlift.config import EngineConfig
from chairlift.option_sources import with_options
from chairlift.server.preparation.api_options import ApiOptions


@with_options
def batch(
    input_file: Annotated[Path, Parameter(help="File of requests, one per line, in OpenAI's batch format.")],
    /,
    *,
    output: Annotated[
        Path,
        Parameter(
            name=("--output", "-o"),
            help="File for the answers, one per line. Answers that it already has are kept.",
        ),
    ],
    served_model_name: Annotated[str | None, Parameter(help="Name of the model in requests.")] = None,
    config: EngineConfig,
    api: ApiOptions,
) -> None:
    """Answer the requests that have no answer yet."""
    prepare_engine()
    check_model(config.model, accept_terms=config.accept_terms)
    from chairlift.server.batch.batch_runner import run_batch

    summary = run_batch(config, input_file, output, served_model_name, api)
    print(summary.text(), file=sys.stderr)
    if summary.remaining:
        raise SystemExit(1)
