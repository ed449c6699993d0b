"""`chairlift top`: shows the state of a running server in the terminal."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from chairlift.errors import ConfigError


def top(
    url: Annotated[str, Parameter(help="URL of the server.")] = "http://127.0.0.1:8000",
    /,
    *,
    api_key: Annotated[
        str | None, Parameter(help="An admin key, if the server requires keys.", env_var="CHAIRLIFT_API_KEY")
    ] = None,
    request: Annotated[
        str | None, Parameter(help="Request whose wait is explained. Default: the head of the queue.")
    ] = None,
    interval: Annotated[float, Parameter(validator=Number(gte=0.1), help="Seconds between updates.")] = 1.0,
) -> None:
    """Show the state of a server until Ctrl-C."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("chairlift top needs a terminal: read /metrics or /v1/engine instead")
    from chairlift.observability.top import HttpSource, TopView, run_top

    with suppress(KeyboardInterrupt), closing(HttpSource(url, api_key)) as source:
        run_top(TopView(source, request), interval)
