"""`chairlift key`: creates an API key and its entry in the key file."""

from __future__ import annotations

from typing import Annotated

import typer

from chairlift.cli.option_groups import OptionValues, add_group


@add_group(
    admin=(bool, "Allow access to the engine and to the requests of all keys.", False),
    weight=(float | None, "Share of the key under --scheduling-policy fair. Default: 1."),
    models=(list[str] | None, "Name of a model that the key may use; may be repeated. Default: all models."),
    requests_per_minute=(float | None, "Maximum number of calls per minute. Default: no limit."),
    tokens_per_minute=(float | None, "Maximum number of prompt and output tokens per minute. Default: no limit."),
    max_concurrent=(int | None, "Maximum number of concurrent calls. Default: no limit."),
)
def key(
    name: Annotated[str, typer.Argument(help="Name of the key, and of its tenant for --scheduling-policy fair.")],
    *,
    options: OptionValues,
) -> None:
    """Create an API key. Its entry for --api-key-file is printed to standard output, the secret to standard error."""
    from chairlift.server.access.keys import key_record, new_secret, to_toml

    secret = new_secret()
    options["admin"], options["models"] = options["admin"] or None, options["models"] or None
    typer.echo(to_toml(key_record(secret, name=name, **options)))
    typer.echo(f"{name}: {secret}", err=True)
