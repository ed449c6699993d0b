"""`chairlift serve`: the port first, then the engine's process, and what answers HTTP while that loads the model."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import replace

from chairlift.config import EngineConfig
from chairlift.engine.process_client import ProcessClient
from chairlift.errors import ConfigError
from chairlift.server.access import AccessOptions
from chairlift.server.api_options import ApiOptions
from chairlift.server.limits import ServerLimits
from chairlift.server.observe_options import ObserveOptions

logger = logging.getLogger("chairlift")


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
    observe: ObserveOptions,
) -> None:
    """Serve until interrupted, and then until what was taken in is answered.

    Args:
        port: 0 takes a free one, which is printed.
        watchdog_timeout: see ProcessClient.
        started: `time.perf_counter()` when the command began, to print how long it took to get ready.

    Raises:
        ConfigError: the address cannot be had, or may not without a key, or static_run_to=global; before the model is
            loaded. Then as `ProcessClient.wait_until_ready`.
    """
    if config.static_run_to == "global":
        raise ConfigError(
            "static_run_to=global needs to know the output lengths of all requests, and a server knows none: "
            "leave it out, or use it offline (bench, simulate)"
        )
    access.check_host(host)
    if weights := access.keys.weights():
        config = replace(config, tenant_weights=weights)
    listener = _listen(host, port)
    client = ProcessClient(config, watchdog_timeout=watchdog_timeout)
    from chairlift.engine.async_llm import AsyncLLM
    from chairlift.engine.heap import settle_heap
    from chairlift.server.app import create_app
    from chairlift.server.drain import DrainingServer
    from chairlift.server.http_protocol import uvicorn_config

    client.wait_until_ready()
    llm = AsyncLLM(client=client)
    shown_host = f"[{host}]" if ":" in host else host
    url = f"{access.scheme}://{shown_host}:{listener.getsockname()[1]}"

    def say_ready() -> None:
        seconds = time.perf_counter() - started
        logger.info(
            "ready in %.1f s: %s/v1 answers as model %r", seconds, url, served_model_name or llm.engine.model_name
        )

    app = create_app(llm, served_model_name, say_ready, keys=access.keys, limits=limits, api=api, observe=observe)
    options = uvicorn_config(
        app,
        limits,
        log_config=None,
        access_log=False,
        timeout_keep_alive=60,
        ssl_certfile=access.ssl_certfile,
        ssl_keyfile=access.ssl_keyfile,
    )
    settle_heap()
    try:
        DrainingServer(options, llm, app.state.admission).run(sockets=[listener])
    finally:
        llm.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from None
    return listener
