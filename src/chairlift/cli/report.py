"""`chairlift report`: draws runs from their event logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chairlift.system.optional_packages import check_installed


def report(
    events: Annotated[
        list[str], typer.Argument(help="Event logs (--event-log), one for each run; LABEL=PATH names a run.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
    png: Annotated[
        bool, typer.Option("--png", help="Also write every figure as a PNG file in the folder of the page.")
    ] = False,
    title: Annotated[str | None, typer.Option(help="Title of the page. Default: the policies and the model.")] = None,
) -> None:
    """Draw runs from their event logs, as one self-contained HTML page with figures and tables."""
    check_installed("matplotlib", "lab", "chairlift report")
    from chairlift.lab.report.build import write_report
    from chairlift.lab.report.run_log import load_runs

    for path in write_report(load_runs(events), output, title, png):
        typer.echo(path)
