"""LocalCluster: a Ray on this machine with replicas of one model, for `chairlift serve --replicas`."""

from __future__ import annotations

import logging
import os
import pwd
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import psutil

from chairlift.cluster.cluster_app import observe_replicas
from chairlift.cluster.cluster_options import ClusterOptions
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError, ConfigError, EngineDeadError
from chairlift.loading.resolve import resolve_model
from chairlift.server.models.served_model import ServedModel
from chairlift.system.cpu_topology import CpuTopology, allowed_cpus

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from chairlift.cluster.cluster_client import ClusterClient

logger = logging.getLogger("chairlift")

INSTALL_HINT: Final = "replicas need Ray Serve, which is not installed: pip install 'chairlift[ray]'"

MAX_NAMES: Final = 5
"""Maximum number of users that an error message names."""

APP_NAME: Final = "chairlift"
NO_HTTP: Final = {"location": "NoServer"}


class LocalCluster:
    """Starts a Ray on this machine, and runs replicas in it.

    Args:
        config: the configuration of each replica. Without `num_threads` the physical cores are divided among them.
        allow_other_users: start a Ray although other users of this machine can connect to its ports.

    Attributes:
        failure: why no replica can be started any more; None while Ray runs.

    Raises:
        ConfigError: Ray is not installed or cannot be started, RAY_ADDRESS names another one, an option cannot be used
            by several replicas, or this machine has other users.
        ModelLoadError: the model cannot be found.
    """

    failure: str | None = None

    def __init__(self, config: EngineConfig, options: ClusterOptions, allow_other_users: bool = False) -> None:
        if address := os.environ.get("RAY_ADDRESS"):
            raise ConfigError(
                f"RAY_ADDRESS={address} has no effect on --replicas, which start their own Ray: unset it, or run "
                "the replicas in that cluster with `serve deploy` (docs/scale-out.md#run-it-on-a-cluster)"
            )
        set_ray_variables()
        try:
            from chairlift.cluster.ray_processes import RayProcesses
        except ImportError:
            raise ConfigError(INSTALL_HINT) from None
        if not allow_other_users and (users := other_users()):
            raise ConfigError(
                f"other users of this machine ({', '.join(users[:MAX_NAMES])}) can connect to the ports on 127.0.0.1 "
                "that Ray opens for replicas: start the server in a separate container or network namespace, or give "
                "--allow-other-users to accept this (docs/scale-out.md#security)"
            )
        if config.num_threads is None and config.device == "cpu":
            cores = CpuTopology().num_physical_cores(allowed_cpus())
            config = replace(config, num_threads=max(1, cores // options.replicas))
        options.actor_options(config)
        resolve_model(config.model, accept_terms=config.accept_terms)
        self._config = config
        self._options = options
        self._client: ClusterClient | None = None
        self._drain: Callable[[], None] = end_process
        try:
            num_cpus = (config.num_threads or 1) * options.replicas
            self._processes = RayProcesses(self._fail, num_cpus=num_cpus, include_dashboard=False)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, end_start)  # Ray handles it with a dump of its stack.
        except Exception as error:  # also of this class, if a process of Ray does not start in time
            raise ConfigError(f"Ray cannot be started: {describe_ray_error(error)}") from None

    def wait_until_ready(self) -> ClusterClient:
        """Start the replicas, and wait until one is ready.

        Raises:
            ModelLoadError, EngineDeadError: they could not be started.
        """
        import ray
        from ray.serve.exceptions import RayServeException

        from chairlift.cluster.ray_deployments import make_client
        from chairlift.cluster.ray_transport import RayTransport, read_facts

        try:
            handle = self._deploy()
            facts = read_facts(handle, self._config)
            self._client = make_client(RayTransport(handle, self._processes.stop), facts, self._config)
        except BaseException as error:  # also a signal
            self._processes.stop()
            of_ray = (OSError, RuntimeError, ValueError, ray.exceptions.RayError, RayServeException)
            if isinstance(error, ChairliftError) or not isinstance(error, of_ray):
                raise
            raise EngineDeadError(f"the replicas could not be started: {describe_ray_error(error)}") from None
        return self._client

    def _deploy(self) -> DeploymentHandle[Any]:
        """Deploy the replicas, and wait until one is ready."""
        from ray import serve

        from chairlift.cluster.ray_deployments import engine_deployment

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(http_options=NO_HTTP, logging_config={"log_level": "WARNING"})
        serve.run(engine_deployment(self._config, self._options), name=APP_NAME, route_prefix=None)
        return serve.get_deployment_handle("engine", APP_NAME)

    def observe(self, model: ServedModel) -> None:
        """Let a model show the replicas."""
        assert self._client is not None
        observe_replicas(model, self._client)

    def on_failure(self, drain: Callable[[], None]) -> None:
        """Call `drain` on any thread when no replica can be started any more. Before this call, the process ends."""
        self._drain = drain
        if self.failure is not None:
            drain()

    def _fail(self, failure: str) -> None:
        self.failure = failure
        logger.error("no replica can be started any more, and the server stops: %s", failure)
        self._drain()


def end_process() -> None:
    """End this process, which is starting. Its main thread may wait for Ray without a limit."""
    os.kill(os.getpid(), signal.SIGTERM)


def end_start(number: int, _frame: FrameType | None) -> NoReturn:
    """End this process, which is starting, after a signal."""
    raise SystemExit(128 + number)


def set_ray_variables() -> None:
    """Set the environment variables of Ray, which it reads when it is imported."""
    defaults = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # A replica that hangs would otherwise be given its whole drain time before it is replaced.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # One event loop for the calls of Ray Serve and of a replica saves two changes of threads for each call.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        # With Ray's default of 15, any other busy process of the machine gets almost all of a core.
        "RAY_worker_niceness": "0",
        # All replicas log the same lines, and Ray would hold back the lines of the second replica.
        "RAY_DEDUP_LOGS": "0",
        **({} if sys.stderr.isatty() else {"RAY_COLOR_PREFIX": "0"}),
    }
    os.environ.update({name: value for name, value in defaults.items() if name not in os.environ})
    os.environ.update(
        {
            # This thread has no event loop that could route its first calls.
            "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
            # Otherwise Ray ends this process a minute after its GCS, without a message.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
            "RAY_AUTH_MODE": "token",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on the loopback.
            # HTTP does not pass through Ray Serve, also if this machine has the settings of a cluster with HAProxy.
            "RAY_SERVE_ENABLE_HA_PROXY": "0",
            "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
        }
    )


def describe_ray_error(error: BaseException) -> str:
    """An error of Ray in one line, without the stacks of other processes that it contains."""
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if others and ("Traceback" in str(error) or first.endswith(":")):
        return f"{first} {others[-1]}"
    return first


FIRST_USER_ID: Final = 501 if sys.platform == "darwin" else 1000
NOBODY_ID: Final = 65534
NO_LOGIN: Final = ("nologin", "false")
"""The names of programs that are the shells of accounts without a login."""


def other_users() -> list[str]:
    """The names of the other users that have a login or a running process, without accounts of the system.

    Accounts of a directory service, which cannot be listed, are found by their processes.
    """
    users = {
        entry.pw_uid: entry.pw_name
        for entry in pwd.getpwall()
        if entry.pw_shell and os.path.basename(entry.pw_shell) not in NO_LOGIN
    }
    for process in psutil.process_iter(["uids", "username"]):
        if (uids := process.info["uids"]) is not None:
            users[uids.real] = process.info["username"]
    own = {os.getuid(), NOBODY_ID}
    return sorted(name for uid, name in users.items() if uid >= FIRST_USER_ID and uid not in own)
