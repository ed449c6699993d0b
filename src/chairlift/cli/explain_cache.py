"""`chairlift explain-cache`: explains what the prefix cache missed in a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def explain_cache(events: Annotated[Path, Parameter(help="Event log (--event-log) of a server.")], /) -> None:
    """Print the prompt tokens that were computed by reason, and the changes of prompts that cost most of them."""
    from chairlift.events import read_events
    from chairlift.lab.report.cache_report import explain_cache as explain
    from chairlift.lab.tables import print_parts

    print_parts(explain(read_events(events)).parts())
