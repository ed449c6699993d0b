"""The routes of the live page and of the chat page: their files, the stream of events, and bursts."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Depends, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.staticfiles import StaticFiles

from chairlift.server.access.admission import AdmissionController
from chairlift.server.access.call import call_of
from chairlift.server.api.routes import read_body
from chairlift.server.http.streaming import cancel_on_disconnect
from chairlift.server.models.model_manager import ModelManager
from chairlift.server.models.served_model import VisibleEngine
from chairlift.server.protocol.encoding import to_named_event
from chairlift.server.telemetry.live_feed import HISTORY_SECONDS
from chairlift.server.telemetry.redaction import Redactor
from chairlift.server.web.burst import start_burst
from chairlift.server.web.page_bodies import BurstBody, PageView
from chairlift.server.web.page_language import Language, with_language
from chairlift.version import __version__

STATIC: Final = Path(__file__).parent / "static"
FRAME_SECONDS: Final = 0.2
IDLE_FRAME_SECONDS: Final = 1.0

PAGES: Final = {"/": "index.html", "/chat": "chat.html", "/docs": "docs.html"}

PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""No script, style or connection of another origin is allowed, and no script in the page itself, so that text of a
model or of a log can never be executed."""


class PageFiles(StaticFiles):
    """The scripts and styles of the pages. The pages themselves have relative links, and are served elsewhere."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        return ("", None) if path.endswith(".html") else super().lookup_path(path)

    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(PAGE_HEADERS)
        return response


def file_router() -> APIRouter:
    """The routes of the pages' files, which need no key and contain no data."""
    routes = APIRouter(include_in_schema=False)
    for path, name in PAGES.items():
        routes.add_api_route(path, page_endpoint(name), methods=["GET"])
    routes.mount("/page", PageFiles(directory=STATIC))
    routes.mount("/docs", StaticFiles(packages=[("fastapi_swagger", "resources")]))
    return routes


def page_endpoint(name: str, lang: Language | None = None) -> Any:
    """The function that answers with a page, in this language or in that of the browser."""

    async def get_page(_request: Request) -> Response:
        if lang is None:
            return FileResponse(STATIC / name, headers=PAGE_HEADERS)
        text = with_language((STATIC / name).read_text(encoding="utf-8"), lang)
        return HTMLResponse(text, headers=PAGE_HEADERS)

    return get_page


def page_router(manager: ModelManager, admission: AdmissionController, has_control: bool) -> APIRouter:
    """The endpoints of the live page. The query parameters select the model, and the replica, that the page shows.

    Requests of other keys have opaque ids, unless the key is an admin's.

    Args:
        has_control: the page may send bursts of requests.
    """
    routes = APIRouter(include_in_schema=False)

    @routes.get("/v1/page")
    async def get_page(request: Request, model: str | None = None) -> PageView:
        """What the page can show and do with this key."""
        key = call_of(request).key
        known = [each.name for each in manager.visible(key)]
        return PageView(
            version=__version__,
            models=known,
            replicas=list(manager.find(model, key).replicas) if known else [],
            is_admin=key.is_admin,
            key=key.name,
            control=has_control,
            history_seconds=HISTORY_SECONDS,
        )

    @routes.get("/v1/page/events")
    async def stream_events(request: Request, model: str | None = None, replica: str | None = None) -> Response:
        """Stream the events of the last ten minutes, and then frames of new events."""
        call = call_of(request)
        served = manager.find(model, call.key).engine(replica)
        redactor = Redactor(served.observer.viewer(call.key), served.observer.tracker)
        return admission.open_events(call, page_stream(served, redactor, admission))

    async def require_control() -> None:
        if not has_control:
            raise HTTPException(403, "this server accepts no bursts: start it with --page-control")

    @routes.post("/v1/page/burst", dependencies=[Depends(require_control)])
    async def send_burst(request: Request, model: str | None = None) -> Response:
        """Send a burst of synthetic requests; see `start_burst`."""
        key = call_of(request).key

        async def start() -> Response:
            with await manager.acquire(manager.find(model, key)) as lease:
                return await start_burst(lease.service.llm, permit, body)

        with admission.open_call(key) as permit:
            body = await read_body(request, BurstBody)
            return await cancel_on_disconnect(request.receive, start())

    return routes


async def page_stream(
    model: VisibleEngine, redactor: Redactor, admission: AdmissionController
) -> AsyncGenerator[bytes, None]:
    """Yield the history for an admin, and then frames of new events (ADR 41), until the server has drained."""
    observer, feed = model.observer, model.feed
    index: int | None = None
    if redactor.viewer.is_admin:
        parts, index = feed.history(), feed.next_index
        for part in parts:
            yield to_named_event("history", b'{"events":[%b]}' % part)
            await asyncio.sleep(0)
    last_frame = -IDLE_FRAME_SECONDS
    is_last = False
    while True:
        now = observer.now()
        events = None if index is None else feed.events_since(index, redactor)
        if events is None:
            if index is not None:
                dropped = {"num_events": feed.next_index - index}
                yield to_named_event("dropped", json.dumps(dropped).encode())
            events = feed.opening(now, redactor)
        index = feed.next_index
        if events or now - last_frame >= IDLE_FRAME_SECONDS:
            last_frame = now
            yield to_named_event("frame", b'{"time":%f,"events":[%b]}' % (now, b",".join(events)))
        if is_last:
            return
        is_last = admission.is_draining and not admission.num_calls
        await asyncio.sleep(FRAME_SECONDS)
