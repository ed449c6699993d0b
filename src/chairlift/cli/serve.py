"""`chairlift serve`: serves an OpenAI-compatible API."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from cyclopts import App

from chairlift.cli.console import ARGUMENTS, OPTIONS, prepare_engine
from chairlift.errors import ConfigError
from chairlift.option_sources import ConfigFile, service_sources, with_options
from chairlift.server.serve_options import ServeOptions

if TYPE_CHECKING:
    from chairlift.config import EngineConfig
    from chairlift.server.serve import EngineCluster

serve = App(name="serve", config=service_sources(), group_arguments=ARGUMENTS, group_parameters=OPTIONS)


@serve.default
@with_options
def start_server(*, options: ServeOptions, config_file: ConfigFile = None) -> None:
    """Serve the models that the options name."""
    started = time.perf_counter()
    prepare_engine(options.observability.access_log_format)
    from chairlift.server.serve import run

    run(options, started, None if options.replicas is None else _local_cluster(options, options.replicas))


def _local_cluster(options: ServeOptions, replicas: int) -> Callable[[EngineConfig], EngineCluster]:
    """What starts the replicas.

    Raises:
        ConfigError: models are loaded on demand.
    """
    from chairlift.cluster.cluster_options import ClusterOptions
    from chairlift.cluster.local_cluster import LocalCluster

    if options.models.is_on_demand:
        raise ConfigError("replicas need one model that is always loaded: name one MODEL, or use chairlift.cluster:app")
    cluster = ClusterOptions(replicas, watchdog_timeout=options.watchdog_timeout)
    return partial(LocalCluster, options=cluster, allow_other_users=options.allow_other_users)
