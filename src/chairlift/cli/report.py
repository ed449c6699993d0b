"""`chairlift report`: draw."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chairlift.system.optional_packages import check_installed


def report(
    events: Annotated[
        list[str], typer.Argument(help="Event logs (--event-log), one a run; LABEL=PATH gives a run a name.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    png: Annotated[bool, typer.Option("--png", help="Write every figure beside the page as well.")] = False,
    title: Annotated[str | None, typer.Option(help="Of the page; the policies and the model if not given.")] = None,
) -> None:
    """Draw runs from their event logs: one HTML page with figures and tables, and nothing from elsewhere."""
    check_installed("matplotlib", "lab", "chairlift report")
    from chairlift.lab.report.build import write_report
    from chairlift.lab.report.run_log import load_runs

    for path in write_report(load_runs(events), output, title, png):
        typer.echo(path)
