"""The options of `chairlift serve`, which the application of a cluster has too."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.loading.resolve import model_name
from chairlift.options import Selection, check_options, option
from chairlift.server.access.access_options import AccessOptions, ServerLimits
from chairlift.server.models.model_options import ModelOptions, ModelSpec, check_names
from chairlift.server.preparation.api_options import ApiOptions

if TYPE_CHECKING:
    from chairlift.server.telemetry.access_log import AccessLog
    from chairlift.server.telemetry.tracing import CallTracer

ROOT_PATH_PATTERN: Final = re.compile(r"(/[\w.~-]+)*", re.ASCII)
ACCESS_LOG_FORMATS: Final = ("text", "json", "none")


def parse_root_path(text: str, name: str = "root_path") -> str:
    """The path prefix below which a proxy publishes the server, without the slash at its end. Raises
    ConfigError if it does not begin with a slash, or has other characters than a path of a URL."""
    prefix = text.rstrip("/")
    if ROOT_PATH_PATTERN.fullmatch(prefix) is None:
        raise ConfigError(f"{name}={text!r:.80} is not a path: write it as /chairlift, of letters, digits and - . _ ~")
    return prefix


@dataclass(frozen=True, slots=True)
class ObservabilityOptions:
    """The options of a server for its access log and its traces. Raises ConfigError if the extra `otel` is missing."""

    OPTION_GROUP: ClassVar = "Observability"

    access_log_format: str = option(
        "text",
        "Format of the access log on standard error; json also for all other log lines.",
        choices=ACCESS_LOG_FORMATS,
    )
    otlp_traces_endpoint: str | None = option(
        None, "URL to which OpenTelemetry spans are sent, such as http://localhost:4318/v1/traces."
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.otlp_traces_endpoint is not None and find_spec("opentelemetry") is None:
            raise ConfigError(
                f"otlp_traces_endpoint={self.otlp_traces_endpoint} needs opentelemetry, which is not installed: "
                f"run {shlex.quote(sys.executable)} -m pip install 'chairlift[otel]'"
            )

    def listeners(self) -> list[AccessLog | CallTracer]:
        """Create the listeners of calls. The caller must close a tracer."""
        from chairlift.server.telemetry.access_log import AccessLog

        found: list[AccessLog | CallTracer] = []
        if self.access_log_format != "none":
            found.append(AccessLog(self.access_log_format))
        if self.otlp_traces_endpoint is not None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            from chairlift.server.telemetry.tracing import CallTracer

            found.append(CallTracer(OTLPSpanExporter(endpoint=self.otlp_traces_endpoint)))
        return found


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The options of a server and of its engine."""

    OPTION_GROUP: ClassVar = "Server"

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 selects a free one.")
    root_path: str = option(
        "", "Path below which a proxy publishes the server and which it removes from requests.", parse=parse_root_path
    )
    served_model_name: str | None = option(None, "Name of the model in requests.")
    replicas: int | None = option(
        None, "Number of engines on this machine, started with Ray Serve (chairlift[ray]).", minimum=1
    )
    allow_other_users: bool = option(
        False, "Start replicas although other users of this machine can connect to Ray's ports."
    )
    watchdog_timeout: float = option(
        120.0, "Seconds without a step after which a busy engine is restarted; 0 disables it.", minimum=0.0
    )
    page_control: bool | None = option(
        None, "Allow the live page to send bursts of synthetic requests. Default: only without keys on the loopback."
    )
    models: ModelOptions = field(default_factory=ModelOptions)
    engine: Annotated[EngineConfig, Selection(without=("model",))] = field(default_factory=EngineConfig)
    limits: ServerLimits = field(default_factory=ServerLimits)
    access: AccessOptions = field(default_factory=AccessOptions)
    api: ApiOptions = field(default_factory=ApiOptions)
    observability: ObservabilityOptions = field(default_factory=ObservabilityOptions)

    def __post_init__(self) -> None:
        check_options(self)
        if (self.served_model_name or "").startswith("["):
            message = f"served_model_name must be one name, got {self.served_model_name}: set aliases in models"
            raise ConfigError(message)
        if self.allow_other_users and self.replicas is None:
            raise ConfigError("allow_other_users has no effect without replicas: remove it")
        if self.limits.share_prefix_cache and not self.access.keys:
            raise ConfigError("share_prefix_cache has no effect without API keys, whose requests it is for: remove it")
        if self.limits.share_prefix_cache and not (self.models.is_on_demand or self.engine.has_prefix_cache):
            raise ConfigError(
                "share_prefix_cache needs the prefix cache: remove it, or set kv=paged and enable_prefix_caching"
            )
        if self.models.only_model is not None:
            object.__setattr__(self, "engine", replace(self.engine, model=self.models.only_model))
        if self.engine.lora_modules and not self.models.is_on_demand:
            check_names([ModelSpec(self.served_model_name or model_name(self.engine.model), self.engine)])

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that requests may name."""
        return self.access.allowed_hosts_for(self.host)

    @property
    def has_page_control(self) -> bool:
        """Whether the live page may send bursts of requests."""
        control = self.page_control
        return self.access.is_private(self.host) if control is None else control
