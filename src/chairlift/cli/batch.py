"""`chairlift batch`: answers a file of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chairlift.cli.options import ModelOption, add_engine_options, log_to_stderr
from chairlift.cli.serve_options import add_api_options
from chairlift.config import EngineConfig
from chairlift.server.api.api_options import ApiOptions


@add_engine_options
@add_api_options
def batch(
    input_file: Annotated[Path, typer.Argument(help="Input file in OpenAI's batch format: one request per line.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Output file: one result per line. Existing results are kept.")
    ],
    model: ModelOption = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in requests. Default: the value of --model.")
    ] = None,
    *,
    config: EngineConfig,
    api: ApiOptions,
) -> None:
    """Answer a file of requests. After an interruption, the same command resumes the batch."""
    log_to_stderr()
    from chairlift.server.batch.batch_runner import run_batch

    summary = run_batch(config, input_file, output, served_model_name, api)
    typer.echo(summary.text(), err=True)
    if summary.remaining:
        raise typer.Exit(1)
