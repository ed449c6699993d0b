"""`chairlift serve`: opens the port, starts the engine process, and serves HTTP when the model has been loaded."""

from __future__ import annotations

import logging
import socket
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Final

from chairlift.config import EngineConfig
from chairlift.engine.process.process_client import ProcessClient
from chairlift.errors import ConfigError
from chairlift.loading.resolve import resolve_model
from chairlift.server.access.access_options import AccessOptions
from chairlift.server.access.server_limits import ServerLimits
from chairlift.server.api.api_options import ApiOptions
from chairlift.server.http.init_process import fork_if_process_1
from chairlift.server.http.process_exit import EXIT_SECONDS, ProcessExit
from chairlift.server.telemetry.observability_options import ObservabilityOptions
from chairlift.server.web.page_options import PageOptions

logger = logging.getLogger("chairlift")

MAX_PORT: Final = 65535
SWITCH_SECONDS: Final = 0.001
"""Seconds for which a thread may hold the interpreter lock while the event loop waits for it."""


def run(
    config: EngineConfig,
    host: str,
    port: int,
    served_model_name: str | None,
    watchdog_timeout: float,
    started: float,
    limits: ServerLimits,
    access: AccessOptions,
    api: ApiOptions,
    observability: ObservabilityOptions,
    pages: PageOptions,
) -> None:
    """Run a server until a signal stops it. `DrainingServer` and `ProcessExit` describe how it stops.

    Args:
        config: The configuration of the engine.
        port: The port to listen on; 0 for a free one, which is logged.
        served_model_name: The name of the model in requests and responses. Default: the model's own name.
        watchdog_timeout: As for `ProcessClient`.
        started: `time.perf_counter()` when the command started, to log the duration of the start.

    Raises:
        ConfigError: The address cannot be used, a log file cannot be written, the certificate cannot be loaded, or an
            option is invalid. These errors are raised before the model is loaded. Then as for
            `ProcessClient.wait_until_ready`.
    """
    fork_if_process_1()
    config = _server_config(config, access)
    config.check_files()
    access.check_host(host)
    access.keys.log_short_secrets()
    tls = access.load_tls()
    listener = _listen(host, port)
    allowed_hosts = access.allowed_hosts_for(host)
    client = ProcessClient(config, watchdog_timeout=watchdog_timeout)

    # These modules are imported while the engine process loads the model, because they take long to import.
    from chairlift.engine.async_llm import AsyncLLM
    from chairlift.engine.memory_trimming import trim_memory
    from chairlift.server.http.application import create_app
    from chairlift.server.http.drain import DrainingServer
    from chairlift.server.http.protocol import uvicorn_config
    from chairlift.server.preparation.preparation import PreparationWorkers
    from chairlift.server.preparation.worker_process import WorkerSetup, tokenizer_fingerprint

    fingerprint = tokenizer_fingerprint(resolve_model(config.model, accept_terms=config.accept_terms))
    client.wait_until_ready()
    llm = AsyncLLM(client=client)
    url = f"{access.scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    log_ready = partial(_log_ready, url, served_model_name or llm.engine.facts.model_name, started)
    facts, depth = client.engine.facts, limits.max_json_depth
    worker_setup = WorkerSetup(config.model, config.skip_tokenizer_init, facts, api, depth, fingerprint)
    app = create_app(
        llm,
        served_model_name,
        log_ready,
        keys=access.keys,
        limits=limits,
        api=api,
        observability=observability,
        cors=access.cors,
        workers=PreparationWorkers(worker_setup),
        allowed_hosts=allowed_hosts,
        pages=pages,
    )
    process_exit = ProcessExit(limits.drain_timeout)
    uvicorn_options = uvicorn_config(app, limits, tls, log_config=None, access_log=False, timeout_keep_alive=60)
    server = DrainingServer(uvicorn_options, app.state.models, app.state.admission, process_exit)
    trim_memory()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        server.run(sockets=[listener])
    finally:
        process_exit.end_at_next_signal()
        process_exit.limit(EXIT_SECONDS)
        llm.close()


def _server_config(config: EngineConfig, access: AccessOptions) -> EngineConfig:
    """The configuration of the engine with the tenant weights of the API keys."""
    if config.static_run_to == "global":
        raise ConfigError(
            "static_run_to=global needs the output lengths of all requests in advance, which a server does not have: "
            "omit the option, or use it offline (bench, simulate)"
        )
    weights = access.keys.tenant_weights()
    return replace(config, tenant_weights=weights) if weights else config


def _log_ready(url: str, model_name: str, started: float) -> None:
    seconds = time.perf_counter() - started
    logger.info("for browsers: the live page %s/ and the chat page %s/chat", url, url)
    logger.info("ready in %.1f s: %s/v1 answers as model %r", seconds, url, model_name)


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"port must be from 1 to {MAX_PORT}, or 0 for a free port, got {port}: choose another --port")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host:.100}:{port}: {error}; choose another --host or --port") from None
    return listener
