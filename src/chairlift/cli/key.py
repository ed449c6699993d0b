"""`chairlift key`: a new API key, and what to write into the key file."""

from __future__ import annotations

from typing import Annotated

import typer


def key(
    name: Annotated[str, typer.Argument(help="What people call it; its requests are scheduled under this name.")],
    admin: Annotated[bool, typer.Option("--admin", help="It may see the engine and everybody's requests.")] = False,
    weight: Annotated[float | None, typer.Option(help="Its share under --scheduling-policy fair; 1.")] = None,
    requests_per_minute: Annotated[float | None, typer.Option(help="Calls in a minute; no limit.")] = None,
    tokens_per_minute: Annotated[float | None, typer.Option(help="Prompt and output tokens; no limit.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Calls at once; no limit.")] = None,
    cpu_seconds_per_minute: Annotated[
        float | None, typer.Option(help="CPU time for parsing, templates, tokenizing and grammars; no limit.")
    ] = None,
) -> None:
    """Make an API key: its entry for --api-key-file on standard output, the secret, once, on standard error."""
    from chairlift.server.access.keys import key_record, new_secret, to_toml

    secret = new_secret()
    record = key_record(
        secret,
        name=name,
        admin=admin or None,
        weight=weight,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent=max_concurrent,
        cpu_seconds_per_minute=cpu_seconds_per_minute,
    )
    typer.echo(to_toml(record))
    typer.echo(f"{name}: {secret}", err=True)
