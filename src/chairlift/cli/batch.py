"""`chairlift batch`: answers a file of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chairlift.cli.engine_options import ModelOption, add_engine_options, log_to_stderr
from chairlift.cli.serve_options import add_api_options, add_sampling_options
from chairlift.config import EngineConfig
from chairlift.server.preparation.api_options import ApiOptions


@add_engine_options
@add_sampling_options
@add_api_options
def batch(
    input_file: Annotated[Path, typer.Argument(help="File of requests, one per line, in OpenAI's batch format.")],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="File for the answers, one per line. Answers that it already has are kept."
        ),
    ],
    model: ModelOption = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name of the model in requests.")] = None,
    *,
    config: EngineConfig,
    api: ApiOptions,
) -> None:
    """Answer a file of requests. After an interruption, the same command continues."""
    log_to_stderr()
    from chairlift.server.batch.batch_runner import run_batch

    summary = run_batch(config, input_file, output, served_model_name, api)
    typer.echo(summary.text(), err=True)
    if summary.remaining:
        raise typer.Exit(1)
