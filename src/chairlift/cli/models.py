"""`chairlift models`: lists the downloaded models, and removes them."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Annotated

from cyclopts import App, Parameter

from chairlift.cli.console import FLAG

models = App(name="models")


@models.default
def list_models(
    *,
    as_json: Annotated[bool, FLAG, Parameter(name="--json", help="Print one line of JSON for each model.")] = False,
) -> None:
    """List the downloaded models with their sizes and paths."""
    from chairlift.loading.model_cache import cached_models

    found = cached_models()
    if as_json:
        for model in found:
            record = {"name": model.name, "path": str(model.path), "num_bytes": model.num_bytes}
            print(json.dumps({**record, "last_used": model.last_used}))
        return
    width = max((len(model.name) for model in found), default=0)
    for model in found:
        day = datetime.fromtimestamp(model.last_used).strftime("%Y-%m-%d")
        print(f"{model.name:{width}}  {model.num_bytes / 1e6:8,.0f} MB  {day}  {model.path}")
    if not found:
        print("No model is downloaded: `chairlift pull` downloads one.", file=sys.stderr)


@models.command
def remove(
    model: Annotated[str, Parameter(help="Name of the model, as `chairlift models` shows it.")],
    /,
    *,
    yes: Annotated[bool, FLAG, Parameter(help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete the files of a downloaded model."""
    from chairlift.loading.model_cache import find_cached_model

    found = find_cached_model(model)
    size = f"{found.num_bytes / 1e6:,.0f} MB"
    if not yes and not _is_confirmed(f"Delete {found.path} ({size})? [y/N]: "):
        raise SystemExit(1)
    found.remove()
    print(f"Deleted {found.path} ({size}).")


def _is_confirmed(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
