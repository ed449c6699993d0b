"""`chairlift report`: shows a recorded run in the live page, or draws runs from their event logs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from chairlift.errors import ConfigError
from chairlift.system.optional_packages import check_installed


def report(
    events: Annotated[list[str], Parameter(help="Event logs (--event-log), one for each run; LABEL=PATH names a run.")],
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(name=("--output", "-o"), help="Folder in which to draw the runs, as batch, memory and latency.png."),
    ] = None,
) -> None:
    """Show one recorded run, or draw runs."""
    if output is not None:
        _draw(events, output)
        return
    if len(events) != 1:
        raise ConfigError(f"the live page shows one event log, got {len(events)}: name one, or draw all with --output")
    from chairlift.server.web.recorded_log import serve_recorded_log

    serve_recorded_log(Path(events[0]), lambda url: print(f"{url} shows {events[0]}; Ctrl-C ends it", flush=True))


def _draw(events: list[str], folder: Path) -> None:
    check_installed("matplotlib", "lab", "chairlift report --output")
    from chairlift.lab.report.pictures import write_pictures
    from chairlift.lab.report.run_log import load_runs

    for path, omitted in write_pictures(load_runs(events), folder).items():
        if omitted is None:
            print(path)
        else:
            print(f"{path} is not drawn: {omitted}", file=sys.stderr)
