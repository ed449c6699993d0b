"""`chairlift serve`: the port first, then the engine's process, and what answers HTTP while that loads the model."""

from __future__ import annotations

import logging
import socket
import time

from chairlift.config import EngineConfig
from chairlift.engine.process_client import ProcessClient
from chairlift.errors import ConfigError

logger = logging.getLogger("chairlift")

SHUTDOWN_SECONDS = 30


def run(
    config: EngineConfig, host: str, port: int, served_model_name: str | None, watchdog_timeout: float, started: float
) -> None:
    """Serve until interrupted.

    Args:
        port: 0 takes a free one, which is printed.
        watchdog_timeout: see ProcessClient.
        started: `time.perf_counter()` when the command began, to print how long it took to get ready.

    Raises:
        ConfigError: the address cannot be had, or static_run_to=global; before the model is loaded. Then as
            `ProcessClient.wait_until_ready`.
    """
    if config.static_run_to == "global":
        raise ConfigError(
            "static_run_to=global needs to know the output lengths of all requests, and a server knows none: "
            "leave it out, or use it offline (bench, simulate)"
        )
    listener = _listen(host, port)
    client = ProcessClient(config, watchdog_timeout=watchdog_timeout)
    import uvicorn

    from chairlift.engine.async_llm import AsyncLLM
    from chairlift.server.app import create_app

    client.wait_until_ready()
    llm = AsyncLLM(client=client)
    shown_host = f"[{host}]" if ":" in host else host
    url = f"http://{shown_host}:{listener.getsockname()[1]}"

    def say_ready() -> None:
        seconds = time.perf_counter() - started
        logger.info(
            "ready in %.1f s: %s/v1 answers as model %r", seconds, url, served_model_name or llm.engine.model_name
        )

    app = create_app(llm, served_model_name, say_ready)
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=SHUTDOWN_SECONDS, timeout_keep_alive=60)
    )
    server.run(sockets=[listener])


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
