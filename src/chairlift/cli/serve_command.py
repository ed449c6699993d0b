"""`chairlift serve`, with all of its options."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.cli.config_file import add_config_file
from chairlift.cli.engine_options import MODEL_HELP, add_engine_options, log_to_stderr
from chairlift.cli.model_options import MODEL_VARIABLE, ModelOptions, add_model_options
from chairlift.cli.option_groups import Command, OptionValues, add_group, option
from chairlift.cli.serve_options import add_sampling_options, add_serve_options
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.server.access.access_options import AccessOptions
from chairlift.server.http.server_limits import ServerLimits
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.telemetry.observability_options import ObservabilityOptions
from chairlift.server.web.page_options import PageOptions

if TYPE_CHECKING:
    from chairlift.server.serve import EngineCluster

ServedModels = Annotated[
    list[str] | None,
    typer.Argument(
        help=f"{MODEL_HELP} Several models are loaded on demand.",
        envvar=MODEL_VARIABLE,
        show_envvar=False,
    ),
]


def add_all_options(command: Command) -> Command:
    """Add the options of `chairlift serve` to a command with the parameters of `serve`."""
    add_own = add_group(
        option(
            "watchdog_timeout",
            float,
            120.0,
            min=0,
            help="Seconds without a step after which a busy engine is restarted; 0 disables it.",
        ),
        host=(str, "Address to listen on.", "127.0.0.1"),
        port=(int, "Port to listen on; 0 selects a free one.", 8000),
        served_model_name=(str | None, "Name of the model in requests."),
        replicas=(int | None, "Number of engines on this machine, started with Ray Serve (chairlift[ray])."),
    )
    for add in (add_own, add_config_file, add_serve_options, add_sampling_options, add_engine_options):
        command = add(command)
    return add_model_options(command)


def start_server(
    model: ServedModels = None,
    *,
    options: OptionValues,
    models: ModelOptions,
    config: EngineConfig,
    limits: ServerLimits,
    access: AccessOptions,
    api: ApiOptions,
    observability: ObservabilityOptions,
    pages: PageOptions,
) -> None:
    """Serve an OpenAI-compatible API: /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages and more."""
    started = time.perf_counter()
    log_to_stderr()
    from chairlift.server.serve import run

    replicas = options.pop("replicas")
    run(
        config,
        **options,
        started=started,
        limits=limits,
        access=access,
        api=api,
        observability=observability,
        pages=pages,
        models=models.specs(config, api) if models.on_demand else None,
        model_limits=models.limits(config) if models.on_demand else None,
        start_cluster=None if replicas is None else _local_cluster(replicas, options["watchdog_timeout"], models),
    )


serve = add_all_options(start_server)


def _local_cluster(
    replicas: int, watchdog_timeout: float, models: ModelOptions
) -> Callable[[EngineConfig], EngineCluster]:
    """What starts the replicas.

    Raises:
        ConfigError: the number of replicas is invalid, or models are loaded on demand.
    """
    from chairlift.cluster.cluster_options import ClusterOptions
    from chairlift.cluster.local_cluster import LocalCluster

    if models.on_demand:
        raise ConfigError("replicas need one model that is always loaded: name one MODEL, or use chairlift.cluster:app")
    return partial(LocalCluster, options=ClusterOptions(replicas, watchdog_timeout=watchdog_timeout))
