"""The options of the access log and of OpenTelemetry traces."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from chairlift.errors import ConfigError
from chairlift.options import check_options, option
from chairlift.system.output_files import check_writable

if TYPE_CHECKING:
    from chairlift.server.telemetry.access_log import AccessLog
    from chairlift.server.telemetry.tracing import CallTracer


ACCESS_LOG_FORMATS: Final = ("text", "json", "none")


@dataclass(frozen=True, slots=True)
class ObservabilityOptions:
    """The options of a server for its access log and its traces.

    Raises:
        ConfigError: the format is unknown, the format is "none" and a file of the log is set, the log cannot
            be written, or the extra `otel` is missing.
    """

    OPTION_GROUP: ClassVar = "Observability"

    access_log_format: str = option(
        "text", "Format of the access log; json also for all log lines on standard error.", choices=ACCESS_LOG_FORMATS
    )
    access_log: Path | None = option(None, "File of the access log; standard error if not set.")
    otlp_traces_endpoint: str | None = option(
        None, "URL to which OpenTelemetry spans are sent, such as http://localhost:4318/v1/traces."
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.access_log_format == "none" and self.access_log is not None:
            raise ConfigError("access_log_format=none writes no log: remove access_log")
        if self.access_log is not None:
            check_writable("access_log", self.access_log)
        if self.otlp_traces_endpoint is not None and find_spec("opentelemetry") is None:
            raise ConfigError(
                f"otlp_traces_endpoint={self.otlp_traces_endpoint} needs opentelemetry, which is not installed: "
                f"run {shlex.quote(sys.executable)} -m pip install 'chairlift[otel]'"
            )

    def listeners(self) -> list[AccessLog | CallTracer]:
        """Create the listeners of calls. The caller must close them."""
        from chairlift.server.telemetry.access_log import AccessLog

        found: list[AccessLog | CallTracer] = []
        if self.access_log_format != "none":
            found.append(AccessLog(self.access_log_format, self.access_log))
        if self.otlp_traces_endpoint is not None:
            from chairlift.server.telemetry.tracing import CallTracer, otlp_exporter

            found.append(CallTracer(otlp_exporter(self.otlp_traces_endpoint)))
        return found
