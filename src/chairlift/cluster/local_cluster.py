"""LocalCluster: a Ray on this machine with replicas of one model, for `chairlift serve --replicas`."""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from chairlift.cluster.cluster_options import ClusterOptions
from chairlift.cluster.replicated_model import observe_replicas
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError, EngineDeadError, ModelLoadError
from chairlift.loading.resolve import resolve_model
from chairlift.server.models.served_model import ServedModel
from chairlift.system.cpu_topology import CpuTopology, allowed_cpus

if TYPE_CHECKING:
    from chairlift.cluster.cluster_client import ClusterClient

logger = logging.getLogger("chairlift")

INSTALL_HINT: Final = "replicas need Ray Serve, which is not installed: pip install 'chairlift[ray]'"


class LocalCluster:
    """Starts a Ray on this machine, or connects to the one of RAY_ADDRESS, and runs replicas in it.

    Args:
        config: the configuration of each replica. Without `num_threads` the physical cores are divided among them.

    Raises:
        ConfigError: Ray is not installed or cannot be reached, or an option cannot be used by several replicas.
        ModelLoadError: the model cannot be found.
    """

    def __init__(self, config: EngineConfig, options: ClusterOptions) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # A replica that hangs would otherwise be given its whole drain time before it is replaced.
        os.environ.setdefault("RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS", "1")
        # One event loop for the calls of Ray Serve and of a replica saves two changes of threads for each call.
        os.environ.setdefault("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0")
        # This thread has no event loop that could route its first calls.
        os.environ["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"] = "1"
        try:
            import ray
        except ImportError:
            raise ConfigError(INSTALL_HINT) from None
        if config.num_threads is None and config.device == "cpu":
            cores = CpuTopology().num_physical_cores(allowed_cpus())
            config = replace(config, num_threads=max(1, cores // options.most))
        options.actor_options(config)
        resolve_model(config.model, accept_terms=config.accept_terms)
        self._config = config
        self._options = options
        self._client: ClusterClient | None = None
        self._app_name = f"chairlift-{secrets.token_hex(4)}"  # several servers may use one cluster
        address = os.environ.get("RAY_ADDRESS")
        resources: dict[str, Any] = {}
        self._is_remote = address is not None
        if address is None:
            resources = {"num_cpus": (config.num_threads or 1) * options.most, "include_dashboard": False}
        try:
            ray.init(address=address, logging_level=logging.WARNING, **resources)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = "Ray cannot be started" if address is None else f"RAY_ADDRESS={address} cannot be reached"
            raise ConfigError(f"{where}: {error}") from None
        if self._is_remote:
            logger.info("the replicas run as the Ray Serve application %s", self._app_name)

    def wait_until_ready(self) -> ClusterClient:
        """Start the replicas, and wait until one is ready.

        Raises:
            ModelLoadError, EngineDeadError: they could not be started.
        """
        import ray
        from ray import serve

        from chairlift.cluster.ray_deployments import engine_deployment, make_client
        from chairlift.cluster.ray_transport import RayTransport, read_facts

        serve.start(http_options={"location": "NoServer"})
        try:
            handle = serve.run(engine_deployment(self._config, self._options), name=self._app_name, route_prefix=None)
            facts = read_facts(handle, self._config)
            self._client = make_client(RayTransport(handle, self._stop), facts, self._config)
        except (RuntimeError, ray.exceptions.RayError) as error:
            self._stop()
            raise EngineDeadError(f"the replicas could not be started: {error}") from None
        except (ModelLoadError, ConfigError):
            self._stop()
            raise
        return self._client

    def observe(self, model: ServedModel) -> None:
        """Let a model show the replicas."""
        assert self._client is not None
        observe_replicas(model, self._client)

    def _stop(self) -> None:
        """Stop the replicas. A Ray that this process has started ends with all of its processes."""
        import ray
        from ray import serve

        if self._is_remote:
            from chairlift.cluster.ray_deployments import stop_aggregators

            serve.delete(self._app_name, _blocking=False)
            stop_aggregators(self._app_name)
        ray.shutdown()
