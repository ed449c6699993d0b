"""LocalCluster: a Ray on this machine with replicas of one model, for `chairlift serve --replicas`."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from chairlift.cluster.cluster_options import ClusterOptions
from chairlift.cluster.gcs_watch import ANSWERS, GCS_LOSS_SECONDS, GCS_TIMEOUT_VARIABLE, gcs_status, wait_for_gcs_loss
from chairlift.cluster.replicated_model import observe_replicas
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError, ConfigError, EngineDeadError
from chairlift.loading.resolve import resolve_model
from chairlift.server.models.served_model import ServedModel
from chairlift.system.cpu_topology import CpuTopology, allowed_cpus
from chairlift.system.other_users import is_readable_by_others, other_users

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from chairlift.cluster.cluster_client import ClusterClient
    from chairlift.cluster.ray_processes import RayProcesses

logger = logging.getLogger("chairlift")

INSTALL_HINT: Final = "replicas need Ray Serve, which is not installed: pip install 'chairlift[ray]'"

MAX_NAMES: Final = 5
"""Maximum number of users that an error message names."""

NO_HTTP: Final = {"location": "NoServer"}

CONNECT_SECONDS: Final = 30.0
"""Maximum seconds to connect to the cluster of RAY_ADDRESS. Ray itself waits for its GCS without a limit."""

LEAVE_SECONDS: Final = 2.0
"""Maximum seconds to stop the replicas in a cluster of RAY_ADDRESS, whose head node may not answer."""

SERVE_START_SECONDS: Final = 30.0
"""Maximum seconds until the controller of Ray Serve answers that another server has started at the same moment."""
SERVE_RETRY_SECONDS: Final = 0.5


class LocalCluster:
    """Starts a Ray on this machine, or connects to the one of RAY_ADDRESS, and runs replicas in it.

    Args:
        config: the configuration of each replica. Without `num_threads` the physical cores are divided among them.
        allow_other_users: start a Ray although other users of this machine can connect to its ports, or use a token
            that they can read.

    Attributes:
        failure: why no replica can be started any more; None while Ray runs.

    Raises:
        ConfigError: Ray is not installed or cannot be reached, an option cannot be used by several replicas, this
            machine has other users, or they can read the token of the cluster.
        ModelLoadError: the model cannot be found.
    """

    failure: str | None = None

    def __init__(self, config: EngineConfig, options: ClusterOptions, allow_other_users: bool = False) -> None:
        address = os.environ.get("RAY_ADDRESS")
        set_ray_variables(address)
        try:
            from chairlift.cluster.ray_processes import RayProcesses
        except ImportError:
            raise ConfigError(INSTALL_HINT) from None
        if not allow_other_users:
            if address is None:
                check_other_users()
            else:
                check_token_file()
        if config.num_threads is None and config.device == "cpu":
            cores = CpuTopology().num_physical_cores(allowed_cpus())
            config = replace(config, num_threads=max(1, cores // options.most))
        options.actor_options(config)
        resolve_model(config.model, accept_terms=config.accept_terms)
        self._config = config
        self._options = options
        self._client: ClusterClient | None = None
        self._processes: RayProcesses | None = None  # None: those of RAY_ADDRESS
        self._drain: Callable[[], None] = end_process
        self._app_name = f"chairlift-{secrets.token_hex(4)}"  # several servers may use one cluster
        try:
            if address is None:
                num_cpus = (config.num_threads or 1) * options.most
                self._processes = RayProcesses(self._fail, num_cpus=num_cpus, include_dashboard=False)
            else:
                connect(address)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, end_start)  # Ray handles it with a dump of its stack.
        except Exception as error:  # also of this class, if a process of Ray does not start in time
            where = "Ray cannot be started" if address is None else f"RAY_ADDRESS={address} cannot be reached"
            raise ConfigError(f"{where}: {describe_ray_error(error)}") from None
        if address is not None:
            logger.info("the replicas run as the Ray Serve application %s", self._app_name)
            if GCS_TIMEOUT_VARIABLE in os.environ:
                threading.Thread(target=self._watch_gcs, args=(address,), name="watch-gcs", daemon=True).start()

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
            self._client = make_client(RayTransport(handle, self._stop), facts, self._config)
        except BaseException as error:  # also a signal
            self._stop()
            of_ray = (OSError, RuntimeError, ValueError, ray.exceptions.RayError, RayServeException)
            if isinstance(error, ChairliftError) or not isinstance(error, of_ray):
                raise
            raise EngineDeadError(f"the replicas could not be started: {describe_ray_error(error)}") from None
        return self._client

    def _deploy(self) -> DeploymentHandle[Any]:
        """Deploy the replicas, and wait until one is ready."""
        from ray import serve

        from chairlift.cluster.ray_deployments import LOGGING, engine_deployment

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        start_serve()
        application = engine_deployment(self._config, self._options)
        if self._processes is None:
            # HAProxy, which the cluster may use, does not allow that the ingress deployment has a router of its own.
            ingress: Any = serve.deployment(
                UnusedIngress, name="ingress", ray_actor_options={"num_cpus": 0}, logging_config=LOGGING
            )
            application = ingress.bind(application)
        serve.run(application, name=self._app_name, route_prefix=None)
        return serve.get_deployment_handle("engine", self._app_name)

    def observe(self, model: ServedModel) -> None:
        """Let a model show the replicas."""
        assert self._client is not None
        observe_replicas(model, self._client)

    def on_failure(self, drain: Callable[[], None]) -> None:
        """Call `drain` on any thread when no replica can be started any more. Before this call, the process ends."""
        self._drain = drain
        if self.failure is not None:
            drain()

    def _watch_gcs(self, address: str) -> None:
        """Report the loss of the GCS of a cluster of RAY_ADDRESS, whose replicas end 60 s after it."""
        wait_for_gcs_loss(address)
        self._fail(f"the GCS of RAY_ADDRESS={address} has not answered for {GCS_LOSS_SECONDS:g} s")

    def _fail(self, failure: str) -> None:
        self.failure = failure
        logger.error("no replica can be started any more, and the server stops: %s", failure)
        self._drain()

    def _stop(self) -> None:
        """Stop the replicas. A Ray that this process has started ends with all of its processes."""
        from chairlift.cluster.ray_processes import RayThread

        if self._processes is not None:
            self._processes.stop()
        else:
            RayThread(self._leave).wait(LEAVE_SECONDS)

    def _leave(self) -> None:
        """Stop the replicas in a cluster that continues, and disconnect from it."""
        import ray
        from ray import serve
        from ray.serve.exceptions import RayServeException

        from chairlift.cluster.ray_deployments import stop_aggregators

        with contextlib.suppress(RayServeException, ray.exceptions.RayError):
            serve.delete(self._app_name, _blocking=False)
            stop_aggregators(self._app_name)
        ray.shutdown()


class UnusedIngress:
    """The ingress deployment that Ray Serve requires of an application. It receives no calls.

    Args:
        engine: the handle of the replicas, which are a deployment of the application because of this argument.
    """

    def __init__(self, engine: DeploymentHandle[Any]) -> None:
        pass


def check_other_users() -> None:
    """Check that this machine has no other users.

    Raises:
        ConfigError: there are some, with their names.
    """
    if users := other_users():
        raise ConfigError(
            f"other users of this machine ({', '.join(users[:MAX_NAMES])}) can connect to the ports on 127.0.0.1 that "
            "Ray opens for replicas: start the server in a container or network namespace of its own, or give "
            "--allow-other-users to accept this (docs/scale-out.md#security)"
        )


def check_token_file() -> None:
    """Check that other users of this machine cannot read the file with the token of the cluster.

    Raises:
        ConfigError: they can, with the file, its mode and the command that changes it.
    """
    if "RAY_AUTH_TOKEN" in os.environ:  # has precedence
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    if is_readable_by_others(path):
        mode = path.stat().st_mode & 0o777
        raise ConfigError(
            f"other users of this machine can read {path} (mode {mode:o}), whose token permits running code in the "
            f"cluster of RAY_ADDRESS: run `chmod 600 {path}`, and use a new token if they have read it; or give "
            "--allow-other-users to accept this"
        )


def connect(address: str) -> None:
    """Connect to a cluster, on another thread: a thread that waits for a GCS in Ray handles no signals.

    Raises:
        TimeoutError: Ray has not connected within CONNECT_SECONDS. Then as for `ray.init`.
    """
    import ray

    from chairlift.cluster.ray_processes import RayThread

    outcome: Future[None] = Future()

    def call_ray() -> None:
        try:
            ray.init(address=address, logging_level=logging.ERROR)  # It warns that this is not the main thread.
            outcome.set_result(None)
        except BaseException as error:  # Without a result the caller would wait forever.
            outcome.set_exception(error)

    logger.info("connecting to the cluster of RAY_ADDRESS=%s", address)
    if not RayThread(call_ray).wait(CONNECT_SECONDS):
        raise TimeoutError(
            f"it has not answered for {CONNECT_SECONDS:g} s: start this cluster, correct RAY_ADDRESS, or unset it for "
            "replicas in a Ray of this machine"
        )
    outcome.result()
    logging.getLogger("ray").setLevel(logging.WARNING)


def end_process() -> None:
    """End this process, which is starting. Its main thread may wait for Ray without a limit."""
    os.kill(os.getpid(), signal.SIGTERM)


def end_start(number: int, _frame: FrameType | None) -> NoReturn:
    """End this process, which is starting, after a signal."""
    raise SystemExit(128 + number)


def set_ray_variables(address: str | None) -> None:
    """Set the environment variables of Ray, which it reads when it is imported.

    Args:
        address: that of a cluster; None if this process starts a Ray.
    """
    defaults = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # A replica that hangs would otherwise be given its whole drain time before it is replaced.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # One event loop for the calls of Ray Serve and of a replica saves two changes of threads for each call.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        # With Ray's default of 15, any other busy process of the machine gets almost all of a core.
        "RAY_worker_niceness": "0",
        # All replicas log the same lines, of which Ray would hold back those of the second replica.
        "RAY_DEDUP_LOGS": "0",
    }
    if not sys.stderr.isatty():
        defaults["RAY_COLOR_PREFIX"] = "0"
    status = None if address is None else gcs_status(address)
    if status == "UNAUTHENTICATED":
        # Ray does this itself only for a Ray that it starts, and logs a warning.
        defaults["RAY_AUTH_MODE"] = "token"
    elif status == "OK":
        logger.warning(
            "RAY_ADDRESS=%s requires no token: every machine that can connect to the ports of this cluster can run "
            "code on its machines; start it with RAY_AUTH_MODE=token (docs/scale-out.md#security)",
            address,
        )
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    # This thread has no event loop that could route its first calls.
    os.environ["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"] = "1"
    if status is None or status in ANSWERS:  # otherwise its loss cannot be detected
        os.environ[GCS_TIMEOUT_VARIABLE] = "86400"
    if address is None:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray listens on the loopback.
        # HTTP does not pass through Ray Serve, also if this machine has the settings of a cluster with HAProxy.
        os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = os.environ["RAY_SERVE_ENABLE_DIRECT_INGRESS"] = "0"


def start_serve() -> None:
    """Start Ray Serve without HTTP if it does not run. Other servers may do this at the same moment."""
    import ray
    from ray import serve

    deadline = time.monotonic() + SERVE_START_SECONDS
    while True:
        try:
            serve.start(http_options=NO_HTTP, logging_config={"log_level": "WARNING"})
        except ray.exceptions.ActorAlreadyExistsError:
            if time.monotonic() > deadline:
                raise
            time.sleep(SERVE_RETRY_SECONDS)
        else:
            return


def describe_ray_error(error: BaseException) -> str:
    """An error of Ray in one line, without the stacks of other processes that it contains."""
    text = str(error) if error.__cause__ is None else f"{error}\n{error.__cause__}"
    if "InvalidAuthToken" in text or "no authentication token" in text or "find an authentication token" in text:
        return (
            "the token of the cluster is missing or incorrect: copy ~/.ray/auth_token from its head node, "
            "or set RAY_AUTH_TOKEN"
        )
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if others and ("Traceback" in text or first.endswith(":")):
        return f"{first} {others[-1]}"
    return first
