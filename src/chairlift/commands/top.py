"""`chairlift top`."""

from __future__ import annotations

from typing import Annotated

import typer


def top(
    url: Annotated[str, typer.Argument(help="Of a running server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="An admin's key, if the server has keys.", envvar="CHAIRLIFT_API_KEY")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch a running server: batch, queue, KV memory, and why requests wait."""
    from chairlift.top.app import TopApp
    from chairlift.top.source import HttpSource

    TopApp(HttpSource(url, api_key), interval).run()
