"""`chairlift top`: shows the state of a running server in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from chairlift.errors import ConfigError
from chairlift.system.optional_packages import check_installed


def top(
    url: Annotated[str, typer.Argument(help="URL of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="An admin key, if the server requires keys.", envvar="CHAIRLIFT_API_KEY")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
) -> None:
    """Show the batch, the queue, KV memory and the wait reasons of requests of a running server."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("chairlift top needs a terminal: read /metrics or /v1/engine instead")
    check_installed("textual", "top", "chairlift top")
    from chairlift.observability.top import HttpSource, TopApp

    TopApp(HttpSource(url, api_key), interval).run()
