"""`chairlift top`: shows the state of a running server in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from chairlift.errors import ConfigError
from chairlift.system.optional_packages import check_installed


def top(
    url: Annotated[str, Parameter(help="URL of the server.")] = "http://127.0.0.1:8000",
    /,
    *,
    api_key: Annotated[
        str | None, Parameter(help="An admin key, if the server requires keys.", env_var="CHAIRLIFT_API_KEY")
    ] = None,
    interval: Annotated[float, Parameter(validator=Number(gte=0.1), help="Seconds between updates.")] = 1.0,
) -> None:
    """Show the state of a server until the program is ended."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("chairlift top needs a terminal: read /metrics or /v1/engine instead")
    check_installed("textual", "top", "chairlift top")
    from chairlift.observability.top import HttpSource, TopApp

    TopApp(HttpSource(url, api_key), interval).run()
