"""`chairlift key`: creates an API key and its entry in the key file."""

from __future__ import annotations

from typing import Annotated

import typer


def key(
    name: Annotated[str, typer.Argument(help="Name of the key, and of its tenant for --scheduling-policy fair.")],
    admin: Annotated[
        bool, typer.Option("--admin", help="Allow access to the engine and to the requests of all keys.")
    ] = False,
    weight: Annotated[
        float | None, typer.Option(help="Share of the key under --scheduling-policy fair. Default: 1.")
    ] = None,
    requests_per_minute: Annotated[
        float | None, typer.Option(help="Maximum number of calls per minute. Default: no limit.")
    ] = None,
    tokens_per_minute: Annotated[
        float | None, typer.Option(help="Maximum number of prompt and output tokens per minute. Default: no limit.")
    ] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(help="Maximum number of concurrent calls. Default: no limit.")
    ] = None,
    cpu_seconds_per_minute: Annotated[
        float | None,
        typer.Option(
            help="Maximum CPU seconds per minute for parsing, templates, tokenizing and grammars. Default: no limit."
        ),
    ] = None,
) -> None:
    """Create an API key. Its entry for --api-key-file is printed to standard output, the secret to standard error."""
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
