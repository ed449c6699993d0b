"""`chairlift serve`: the port first, then the engine's process, and what answers HTTP while that loads the model."""

from __future__ import annotations

import logging
import socket
import sys
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

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

if TYPE_CHECKING:
    import ssl

    import uvicorn
    from fastapi import FastAPI

logger = logging.getLogger("chairlift")

MAX_PORT: Final = 65535
SWITCH_SECONDS: Final = 0.001
"""How long a thread that prepares a request may keep the interpreter while the event loop waits for it."""


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
) -> None:
    """Serve until interrupted, and then until what was taken in is answered, or the process ends, see `ProcessExit`.

    Args:
        port: 0 takes a free one, which is printed.
        watchdog_timeout: see ProcessClient.
        started: `time.perf_counter()` when the command began, to print how long it took to get ready.

    Raises:
        ConfigError: the address cannot be had, or may not without a key, a log cannot be written, the certificate
            cannot be used, or static_run_to=global; before the model is loaded. Then as
            `ProcessClient.wait_until_ready`.
    """
    fork_if_process_1()
    config = _servable(config, access)
    config.check_files()
    access.check_host(host)
    access.keys.log_short_secrets()
    tls = access.load_tls()
    listener = _listen(host, port)
    allowed_hosts = access.allowed_hosts_for(host)
    client = ProcessClient(config, watchdog_timeout=watchdog_timeout)

    # These take long to import; meanwhile the engine's process loads the model.
    from chairlift.engine.async_llm import AsyncLLM
    from chairlift.engine.memory_trimming import trim_memory
    from chairlift.server.http.application import create_app
    from chairlift.server.http.drain import DrainingServer
    from chairlift.server.preparation.preparation import PreparationWorkers
    from chairlift.server.preparation.worker_process import WorkerSetup, tokenizer_fingerprint

    fingerprint = tokenizer_fingerprint(resolve_model(config.model))
    client.wait_until_ready()
    llm = AsyncLLM(client=client)
    url = f"{access.scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    log_ready = partial(_log_ready, url, served_model_name or llm.engine.model_name, started)
    app = create_app(
        llm,
        served_model_name,
        log_ready,
        keys=access.keys,
        limits=limits,
        api=api,
        observability=observability,
        cors=access.cors,
        workers=PreparationWorkers(
            WorkerSetup(
                config.model,
                config.skip_tokenizer_init,
                client.engine.facts,
                api,
                limits.max_json_depth,
                fingerprint,
            )
        ),
        allowed_hosts=allowed_hosts,
    )
    process_exit = ProcessExit(limits.drain_timeout)
    server = DrainingServer(_uvicorn_config(app, limits, tls), llm, app.state.admission, process_exit)
    trim_memory()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        server.run(sockets=[listener])
    finally:
        process_exit.end_at_next_signal()
        process_exit.limit(EXIT_SECONDS)
        llm.close()


def _servable(config: EngineConfig, access: AccessOptions) -> EngineConfig:
    """The engine of a server: it cannot know the future, and its tenants' weights may come with their keys."""
    if config.static_run_to == "global":
        raise ConfigError(
            "static_run_to=global needs to know the output lengths of all requests, and a server knows none: "
            "leave it out, or use it offline (bench, simulate)"
        )
    weights = access.keys.tenant_weights()
    return replace(config, tenant_weights=weights) if weights else config


def _log_ready(url: str, model_name: str, started: float) -> None:
    seconds = time.perf_counter() - started
    logger.info("ready in %.1f s: %s/v1 answers as model %r", seconds, url, model_name)


def _uvicorn_config(app: FastAPI, limits: ServerLimits, tls: ssl.SSLContext | None) -> uvicorn.Config:
    from chairlift.server.http.protocol import uvicorn_config

    return uvicorn_config(
        app,
        limits,
        tls,
        log_config=None,
        access_log=False,
        timeout_keep_alive=60,
    )


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"port must be from 1 to {MAX_PORT}, or 0 for a free one, got {port}: choose another --port")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host:.100}:{port}: {error}; choose another --host or --port") from None
    return listener
