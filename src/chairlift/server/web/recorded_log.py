"""A server of the live page for a recorded event log, without an engine."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse
from starlette.routing import Mount, Route

from chairlift.errors import ConfigError
from chairlift.events import EngineStarted, read_events
from chairlift.server.web.page_bodies import PageView
from chairlift.server.web.page_routes import STATIC, PageFiles, page_endpoint
from chairlift.version import __version__

HOST: Final = "127.0.0.1"


def recorded_log_app(log: Path) -> Starlette:
    """The application that shows one event log in the live page."""
    view = PageView(
        version=__version__,
        models=[],
        is_admin=True,
        key="",
        control=False,
        recorded_log=log.name,
        history_seconds=0.0,
    ).model_dump()

    async def get_view(_request: Request) -> JSONResponse:
        return JSONResponse(view)

    async def get_log(_request: Request) -> FileResponse:
        return FileResponse(log, media_type="application/jsonl")

    routes = [Route("/", page_endpoint("index.html")), Route("/v1/page", get_view), Route("/v1/page/log", get_log)]
    own_names = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    return Starlette(routes=[*routes, Mount("/page", PageFiles(directory=STATIC))], middleware=[own_names])


def serve_recorded_log(log: Path, on_ready: Callable[[str], None]) -> None:
    """Serve the live page of an event log on a free port of this machine until a signal stops it, and pass its URL to
    `on_ready`. Raises ConfigError if the file cannot be read, or is not an event log."""
    if not isinstance(next(read_events(log), None), EngineStarted):
        raise ConfigError(
            f"not an event log: {log}: its first event must be engine_started; give a file of --event-log"
        )
    listener = socket.create_server((HOST, 0))
    server = uvicorn.Server(uvicorn.Config(recorded_log_app(log), log_level="warning"))
    on_ready(f"http://{HOST}:{listener.getsockname()[1]}/")
    server.run(sockets=[listener])
