"""`chairlift batch`: a file of requests in, a file of answers out."""

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
    input_file: Annotated[Path, typer.Argument(help="Requests, one a line, in OpenAI's batch file format.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Answers, one a line; what is there already stays.")],
    model: ModelOption = None,
    served_model_name: Annotated[str | None, typer.Option(help="What requests call the model.")] = None,
    *,
    config: EngineConfig,
    api: ApiOptions,
) -> None:
    """Answer a file of requests. Run again after an interruption, it goes on where it was."""
    log_to_stderr()
    from chairlift.server.batch.batch_runner import run_batch

    summary = run_batch(config, input_file, output, served_model_name, api)
    typer.echo(summary.sentence(), err=True)
    if summary.left:
        raise typer.Exit(1)
