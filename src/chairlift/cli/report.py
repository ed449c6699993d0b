"""`chairlift report`: draws runs from their event logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chairlift.cli.option_groups import is_given
from chairlift.errors import ConfigError
from chairlift.system.optional_packages import check_installed


def report(
    ctx: typer.Context,
    events: Annotated[
        list[str], typer.Argument(help="Event logs (--event-log), one for each run; LABEL=PATH names a run.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
    png: Annotated[
        bool, typer.Option("--png", help="Also write every figure as a PNG file in the folder of the page.")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="Show one log in the live page instead, on a free port of this machine.")
    ] = False,
    title: Annotated[str | None, typer.Option(help="Title of the page. Default: the policies and the model.")] = None,
) -> None:
    """Draw runs from their event logs, as one self-contained HTML page with figures and tables."""
    if live:
        _show_live(ctx, events)
        return
    check_installed("matplotlib", "lab", "chairlift report")
    from chairlift.lab.report.build import write_report
    from chairlift.lab.report.run_log import load_runs

    for path in write_report(load_runs(events), output, title, png):
        typer.echo(path)


def _show_live(ctx: typer.Context, events: list[str]) -> None:
    from chairlift.server.web.recorded_log import serve_recorded_log

    if unused := [f"--{name}" for name in ("output", "png", "title") if is_given(ctx, name)]:
        raise ConfigError(f"{', '.join(unused)} cannot be combined with --live: leave it out")
    if len(events) != 1:
        raise ConfigError(f"--live shows one event log, got {len(events)}: name one of them")
    serve_recorded_log(Path(events[0]), lambda url: typer.echo(f"{url} shows {events[0]}; Ctrl-C ends it"))
