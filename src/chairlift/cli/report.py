"""`chairlift report`: shows recorded runs in the live page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from chairlift.errors import ConfigError
from chairlift.server.web.page_language import Language
from chairlift.system.output_files import check_writable, write_output


def report(
    events: Annotated[Path, Parameter(help="Event log (--event-log) of one run.")],
    other: Annotated[Path | None, Parameter(help="Event log of another run, which is shown beside it.")] = None,
    /,
    *,
    host: Annotated[str, Parameter(help="Address on which the page is served.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port of the page. 0 is a free port.")] = 0,
    output: Annotated[
        Path | None,
        Parameter(name=("--output", "-o"), help="File for the page, which needs no server."),
    ] = None,
    lang: Annotated[Language | None, Parameter(help="Language of the page. Default: that of the browser.")] = None,
) -> None:
    """Show a recorded run, or two side by side, until Ctrl-C, or write them to a file."""
    from chairlift.lab.recorded_page import recorded_page
    from chairlift.server.web.recorded_log import page_app, recorded_log_app, serve_recorded_log

    logs = [events] if other is None else [events, other]
    if output is not None:
        if output.resolve() in [log.resolve() for log in logs]:
            raise ConfigError(
                f"output={output} is an event log of this report, which it would replace: use another file"
            )
        check_writable("output", output)
        write_output("output", output, recorded_page(logs, lang))
        print(f"{output} shows {' and '.join(map(str, logs))}")
        return
    app = recorded_log_app(events, host, lang) if other is None else page_app(recorded_page(logs, lang), host)
    serve_recorded_log(
        app, lambda url: print(f"{url} shows {' and '.join(map(str, logs))}; Ctrl-C ends it", flush=True), host, port
    )
