"""`chairlift top`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from chairlift.errors import ConfigError
from chairlift.system.optional_packages import check_installed


def top(
    url: Annotated[str, typer.Argument(help="Of a running server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="An admin's key, if the server has keys.", envvar="CHAIRLIFT_API_KEY")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch a running server: batch, queue, KV memory, and why requests wait."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("chairlift top draws on a terminal, and there is none: read /metrics or /v1/engine instead")
    check_installed("textual", "top", "chairlift top")
    from chairlift.observability.top.app import TopApp
    from chairlift.observability.top.source import HttpSource

    TopApp(HttpSource(url, api_key), interval).run()
