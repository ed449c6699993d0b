"""`chairlift report`: shows a recorded run in the live page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def report(events: Annotated[Path, Parameter(help="Event log (--event-log) of one run.")], /) -> None:
    """Show a recorded run until Ctrl-C."""
    from chairlift.server.web.recorded_log import serve_recorded_log

    serve_recorded_log(events, lambda url: print(f"{url} shows {events}; Ctrl-C ends it", flush=True))
