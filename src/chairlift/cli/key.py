"""`chairlift key`: creates an API key and its entry in the key file."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from chairlift.cli.console import FLAG


def key(
    name: Annotated[str, Parameter(help="Name of the key, and of its tenant for --scheduling-policy fair or dlpm.")],
    /,
    *,
    admin: Annotated[bool, FLAG, Parameter(help="Allow access to the engine and to the requests of all keys.")] = False,
    weight: Annotated[
        float | None, Parameter(help="Share of the key under --scheduling-policy fair or dlpm. Default: 1.")
    ] = None,
    models: Annotated[
        list[str] | None,
        Parameter(negative=(), help="Name of a model that the key may use; may be repeated. Default: all models."),
    ] = None,
    requests_per_minute: Annotated[
        float | None, Parameter(help="Maximum number of calls per minute. Default: no limit.")
    ] = None,
    tokens_per_minute: Annotated[
        float | None, Parameter(help="Maximum number of prompt and output tokens per minute. Default: no limit.")
    ] = None,
    max_concurrent: Annotated[
        int | None, Parameter(help="Maximum number of concurrent answers (prompts times n). Default: no limit.")
    ] = None,
    slo: Annotated[
        str | None, Parameter(help='SLO of calls without one in milliseconds: "ttft:500 tpot:50". Default: none.')
    ] = None,
) -> None:
    """Create an API key and the record that the key file has of it."""
    from chairlift.server.access.keys import key_record, new_secret, to_toml
    from chairlift.slo import parse_slo

    secret = new_secret()
    record = key_record(
        secret,
        name=name,
        admin=admin or None,
        weight=weight,
        models=models or None,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent=max_concurrent,
        slo=None if slo is None else parse_slo(slo, "slo").to_mapping(),
    )
    print(to_toml(record))
    print(f"{name}: {secret}", file=sys.stderr)
