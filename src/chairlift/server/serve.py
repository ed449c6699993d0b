"""`chairlift serve`: opens the port, starts the engine process, and serves HTTP when the model has been loaded."""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from chairlift.config import EngineConfig
from chairlift.engine.event_hub import EventHub
from chairlift.engine.memory_trimming import limit_arenas, trim_memory
from chairlift.engine.process.client import EngineClient
from chairlift.engine.process.process_client import ProcessClient
from chairlift.errors import ConfigError, EngineDeadError
from chairlift.policy_class import is_fair
from chairlift.server.access.access_options import ANY, AccessOptions
from chairlift.server.http.http_protocol import listen, url_of
from chairlift.server.models.model_options import ModelSpec
from chairlift.server.serve_options import ServeOptions
from chairlift.system.memory_amounts import format_memory

if TYPE_CHECKING:
    from chairlift.server.models.model_manager import ModelManager
    from chairlift.server.models.served_model import ServedModel

logger = logging.getLogger("chairlift")


class EngineCluster(Protocol):
    """Several engines of one model that are used as one.

    Attributes:
        failure: why the cluster cannot continue; None while it can.
    """

    failure: str | None

    def wait_until_ready(self) -> EngineClient:
        """Wait until requests can be sent. Raises ModelLoadError, ConfigError or EngineDeadError."""

    def observe(self, model: ServedModel) -> None:
        """Show the engines as the replicas of a model."""

    def on_failure(self, drain: Callable[[], None]) -> None:
        """Call `drain` on any thread when the cluster cannot continue. Requests in progress can still be answered."""


STANDARD_ERROR: Final = 2
SWITCH_SECONDS: Final = 0.001  # for which a thread may hold the interpreter lock while the event loop waits for it


def run(
    options: ServeOptions, started: float, start_cluster: Callable[[EngineConfig], EngineCluster] | None = None
) -> None:
    """Run a server until a signal stops it. `DrainingServer` describes how it stops.

    Args:
        started: `time.perf_counter()` when the command started, to log the duration of the start.
        start_cluster: starts several engines for the configuration, instead of one.

    Raises:
        ConfigError: an option cannot be used. This is raised before the model is loaded, and then as for
            `ProcessClient.wait_until_ready` and `uvicorn_config`.
        EngineDeadError: the cluster could not continue, and the server has drained.
    """
    limit_arenas()
    faulthandler.register(signal.SIGUSR1, file=STANDARD_ERROR)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server handles it; the processes of Ray inherit this
    specs, config, access = [], options.engine, options.access
    if options.models.is_on_demand:
        specs = server_specs(options.models.specs(config, options.api), options.served_model_name, access)
    else:
        config = server_config(config, access)
    access.check_host(options.host)
    access.keys.log_short_secrets()
    listener = listen(options.host, options.port)
    cluster = None if start_cluster is None else start_cluster(config)
    engine: EngineCluster | ProcessClient | None = cluster
    if engine is None and not specs:
        engine = ProcessClient(config, watchdog_timeout=options.watchdog_timeout)

    # These modules are imported while the engine process loads the model, because they take long to import.
    from chairlift.server.application import create_models_app
    from chairlift.server.draining_server import DrainingServer, end_process_after
    from chairlift.server.http.http_protocol import uvicorn_config

    manager = _make_manager(options, specs, engine)
    if cluster is not None:
        cluster.observe(manager.default)
    if ANY not in (hosts := options.hosts):
        logger.info("requests for hosts other than %s get a 400; --allowed-hosts names others", ", ".join(hosts))
    app = create_models_app(
        manager, options, partial(_log_ready, url_of(options.host, listener, options.access.scheme), manager, started)
    )
    reload = partial(reload_files, options, manager)
    try:
        http_config = uvicorn_config(app, **http_options(options), log_config=None, access_log=False)
        server = DrainingServer(http_config, manager, app.state.admission, end_process_after, reload)
        if cluster is not None:
            cluster.on_failure(server.drain)
        trim_memory()
        sys.setswitchinterval(SWITCH_SECONDS)
        server.run(sockets=[listener])
    finally:
        manager.close()
    if cluster is not None and cluster.failure is not None:
        raise EngineDeadError(f"the server has stopped: {cluster.failure}")


def http_options(options: ServeOptions) -> dict[str, Any]:
    """The options of a server that uvicorn has under the same names."""
    access = options.access
    return {
        "ssl_certfile": access.ssl_certfile,
        "ssl_keyfile": access.ssl_keyfile,
        "root_path": options.root_path,
        "timeout_keep_alive": options.limits.timeout_keep_alive,
    }


async def reload_files(options: ServeOptions, manager: ModelManager) -> None:
    """Reopen the log files of the loaded models and read the API keys again, such as after SIGHUP, and log what was
    done."""
    opened: list[str] = []
    for model in manager.models:
        is_on_demand = options.models.is_on_demand
        config = model.spec.config if is_on_demand else options.engine
        files = [name for name in ("event_log", "record_trace") if getattr(config, name) is not None]
        if files and model.service is not None:
            model.service.llm.reopen_files()
            opened += [f"{name} (by the engine{f' of {model.name!r}' * is_on_demand})" for name in files]
    keys = await options.access.keys.reload()
    logger.info("SIGHUP: files reopened: %s; %s", ", ".join(opened) or "none", keys or "no API keys were read")


def _make_manager(
    options: ServeOptions, specs: list[ModelSpec], engine: EngineCluster | ProcessClient | None
) -> ModelManager:
    """The manager of models that are loaded when they are used, or of the one model of an engine that is starting."""
    from chairlift.engine.async_llm import AsyncLLM
    from chairlift.server.application import make_single_manager
    from chairlift.server.models.engine_loader import EngineLoader
    from chairlift.server.models.model_manager import ModelManager
    from chairlift.server.models.served_model import ServedModel

    if engine is not None:
        llm = AsyncLLM(client=engine.wait_until_ready())
        return make_single_manager(llm, options.served_model_name, options.api)
    models = [ServedModel(spec, EventHub()) for spec in specs]
    return ModelManager(models, EngineLoader(options.watchdog_timeout), options.models.memory_budget(options.engine))


def server_specs(specs: Sequence[ModelSpec], served_model_name: str | None, access: AccessOptions) -> list[ModelSpec]:
    """The models of a server with the configurations of their engines. Raises ConfigError if `served_model_name` is
    set, a key is limited to models that are not among these, or as `server_config`."""
    if served_model_name is not None:
        raise ConfigError(
            f"served_model_name={served_model_name} is for one model without options of its own: "
            "name models with --models"
        )
    names = {spec.name for spec in specs}
    for key in access.keys.by_tenant.values():
        if key.models is not None and (unknown := key.models - names):
            raise ConfigError(
                f"API key {key.name!r} is limited to the models {', '.join(sorted(unknown))}, which are not "
                f"served: the models are {', '.join(sorted(names))}"
            )
    return [replace(spec, config=server_config(spec.config, access)) for spec in specs]


def server_config(config: EngineConfig, access: AccessOptions) -> EngineConfig:
    """The configuration of the engine of a server, with the tenant weights of the API keys. Raises ConfigError if an
    option cannot be used by a server, or a file cannot be written."""
    if config.static_run_to == "global":
        raise ConfigError(
            "static_run_to=global needs the output lengths of all requests in advance, which a server does not have: "
            "omit the option, or use it offline (bench, simulate)"
        )
    if config.length_predictor == "oracle":
        raise ConfigError(
            "length_predictor=oracle needs the output lengths of all requests in advance, which a server does not "
            "have: set --length-predictor history or max_tokens, or use it offline (bench, simulate)"
        )
    if config.kv in ("pow2", "oracle"):
        raise ConfigError(
            f"kv={config.kv} needs the output lengths of all requests in advance, which a server does not have: set "
            "--kv paged, exact or max, or use it offline (bench, simulate)"
        )
    config.check_files()
    weights = access.keys.tenant_weights()
    if weights and not is_fair(config.scheduling_policy):
        raise ConfigError(
            f"weight={weights[min(weights)]:g} of API key {min(weights)!r} needs scheduling_policy=fair or dlpm, got "
            f"{config.scheduling_policy}: set --scheduling-policy fair or dlpm, or remove the weights of keys"
        )
    if weights and config.tenant_weights:
        raise ConfigError(
            f"tenant_weights cannot be combined with the weights of API keys, such as {weights[min(weights)]:g} of "
            f"{min(weights)!r}: remove tenant_weights, or the weights of keys"
        )
    if unknown := ", ".join(sorted(set(config.tenant_weights or ()) - set(access.keys.by_tenant))):
        known = ", ".join(sorted(access.keys.by_tenant)) or "none"
        logger.info("tenant_weights of %s: no effect until API keys have these names (now: %s)", unknown, known)
    return replace(config, tenant_weights=weights) if weights else config


def _log_ready(url: str, manager: ModelManager, started: float) -> None:
    seconds = time.perf_counter() - started
    names = ", ".join(repr(model.name) for model in manager.models)
    logger.info("for browsers: the live page %s/ and the chat page %s/chat", url, url)
    if manager.default.service is not None:
        logger.info("ready in %.1f s: %s/v1 answers as model %s", seconds, url, names)
        return
    limit = "" if manager.budget is None else f" within {format_memory(manager.budget)}"
    logger.info("ready in %.1f s: %s/v1 loads the models %s on demand%s", seconds, url, names, limit)
