"""A server of the live page for a recorded event log, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse
from starlette.routing import Mount, Route

from chairlift.errors import ConfigError
from chairlift.events import EngineStarted, read_events
from chairlift.server.access.access_options import is_loopback
from chairlift.server.http.http_protocol import listen, url_of
from chairlift.server.web.page_bodies import PageView
from chairlift.server.web.page_language import Language
from chairlift.server.web.page_routes import STATIC, PageFiles, page_endpoint
from chairlift.version import __version__

HOST: Final = "127.0.0.1"


def recorded_view(log: Path) -> dict[str, Any]:
    """What the page knows of its server, for a recorded log."""
    return PageView(
        version=__version__,
        models=[],
        is_admin=True,
        key="",
        control=False,
        recorded_log=log.name,
        history_seconds=0.0,
    ).model_dump()


def recorded_log_app(log: Path, host: str = HOST, lang: Language | None = None) -> Starlette:
    """The application that shows one event log in the live page. Raises ConfigError as `check_log`."""
    check_log(log)
    view = recorded_view(log)

    async def get_view(_request: Request) -> JSONResponse:
        return JSONResponse(view)

    async def get_log(_request: Request) -> FileResponse:
        return FileResponse(log, media_type="application/jsonl")

    routes = [Route("/", page_endpoint("index.html", lang)), Mount("/page", PageFiles(directory=STATIC))]
    routes += [Route("/v1/page", get_view), Route("/v1/page/log", get_log)]
    return Starlette(routes=routes, middleware=[_own_names(host)])


def page_app(text: str, host: str = HOST) -> Starlette:
    """The application that shows a page that consists of one file."""

    async def get_page(_request: Request) -> HTMLResponse:
        return HTMLResponse(text)

    return Starlette(routes=[Route("/", get_page)], middleware=[_own_names(host)])


def _own_names(host: str) -> Middleware:
    """Rejects calls with the name of another host, which a page of the web could have made. Other computers can use any
    name of this one, unless only this computer can connect."""
    names = {HOST, "localhost", f"[{host}]" if ":" in host else host}
    return Middleware(TrustedHostMiddleware, allowed_hosts=sorted(names) if is_loopback(host) else ["*"])


def check_log(log: Path) -> None:
    """Raise ConfigError if the file cannot be read, or is not an event log."""
    if not isinstance(next(read_events(log), None), EngineStarted):
        raise ConfigError(
            f"not an event log: {log}: its first event must be engine_started; give a file of --event-log"
        )


def serve_recorded_log(app: Starlette, on_ready: Callable[[str], None], host: str = HOST, port: int = 0) -> None:
    """Serve the application until a signal stops it, and pass its URL to `on_ready`. Raises ConfigError if it cannot
    listen there."""
    listener = listen(host, port)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    on_ready(f"{url_of(host, listener)}/")
    server.run(sockets=[listener])
