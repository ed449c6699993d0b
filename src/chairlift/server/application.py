"""The HTTP application: endpoints, middlewares and error handlers over one or several models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.engine.async_llm import AsyncLLM
from chairlift.errors import ChairliftError, ConfigError
from chairlift.server.access.access_options import ANY
from chairlift.server.access.admission import AdmissionController
from chairlift.server.access.call import CLIENT_CLOSED_REQUEST, call_of
from chairlift.server.access.call_checks import body_limit, host_filter, key_filter
from chairlift.server.api import engine, health, models, requests
from chairlift.server.api.routes import ENDPOINTS, EndpointCaller, make_router
from chairlift.server.http.error_responses import error_parts, error_response
from chairlift.server.models.model_manager import ModelManager
from chairlift.server.models.model_options import ModelSpec
from chairlift.server.models.served_model import ModelService, ServedModel
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.serve_options import ServeOptions
from chairlift.server.telemetry.access_log import AccessLog
from chairlift.server.telemetry.call_log import CallLogMiddleware
from chairlift.server.web.page_routes import file_router, page_router
from chairlift.version import __version__


def head_as_get(app: ASGIApp) -> ASGIApp:
    """The application, in which HEAD has the response of GET without its body.

    The response is complete with its headers. Then uvicorn's `receive` reports a disconnect, which ends a stream.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await app(scope, receive, send)
            return

        async def send_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        await app({**scope, "method": "GET"}, receive, send_headers)

    return call


EXPOSED_HEADERS: Final = ("Retry-After", "x-should-retry", "x-request-id", "request-id")
"""Response headers that pages may read besides the standard ones: when to retry, and the id of an answer."""


def create_app(llm: AsyncLLM, options: ServeOptions) -> FastAPI:
    """Create the application that serves the API over one engine, which it closes when it shuts down; raises as
    `make_single_manager`."""
    return create_models_app(make_single_manager(llm, options.served_model_name, options.api), options)


def make_single_manager(llm: AsyncLLM, served_model_name: str | None, api: ApiOptions) -> ModelManager:
    """Create the manager of one model that is always loaded, by default under its own name; raises ConfigError if a
    LoRA adapter has this name."""
    name = served_model_name or llm.engine.facts.model_name
    if name in llm.engine.adapters:
        raise ConfigError(f"lora_modules: {name!r} is the name of the model: use another name for the adapter")
    model = ServedModel(ModelSpec(name), llm.events)
    service = ModelService(llm, api)
    model.set_service(service)
    if service.memory_bytes:
        # Memory of the pool is allocated when it is first written, and most of it has not been.
        model.memory_bytes = service.memory_bytes + llm.engine.facts.kv_cache_plan.num_bytes
    return ModelManager([model])


class Application(FastAPI):
    """The application, whose description in /openapi.json names the API key."""

    def openapi(self) -> dict[str, Any]:
        schema = super().openapi()
        schema["components"]["securitySchemes"] = {"API key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"API key": []}, {}]
        return schema


def create_models_app(
    manager: ModelManager,
    options: ServeOptions,
    on_ready: Callable[[], None] = lambda: None,
    share_usage: Callable[[AdmissionController], Coroutine[None, None, None]] | None = None,
) -> FastAPI:
    """Create the application that serves the API over the models of a manager, which it closes when it shuts down.

    Args:
        on_ready: called when the application accepts requests.
        share_usage: charges keys for what they use of other servers, until it is cancelled.

    Returns:
        The application. `app.state.admission` counts the calls in progress and can drain the server, `app.state.models`
        is the manager, `app.state.listeners` receive ended calls, and `app.state.paths` lists the paths of the routes.
    """
    admission = AdmissionController(options.limits, options.access.keys)
    listeners = options.observability.listeners()

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        manager.open()
        on_ready()
        work = [] if share_usage is None else [share_usage(admission)]
        tasks = [asyncio.create_task(each) for each in (*work, options.access.keys.watch())]
        yield
        for task in tasks:
            task.cancel()
        await manager.aclose()
        for listener in listeners:
            if not isinstance(listener, AccessLog):
                listener.close()

    app = Application(title="Chairlift", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.admission = admission
    app.state.models = manager
    app.state.listeners = listeners
    _add_middlewares(app, options)
    app.add_middleware(CallLogMiddleware, find=manager.find_sequences, listeners=listeners)
    for kind in (ChairliftError, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, _respond_to_error)
    _add_routes(app, manager, admission, options)
    return app


def _add_middlewares(app: FastAPI, options: ServeOptions) -> None:
    """Add the middlewares. Each one encloses those that were added before it.

    The CORS middleware encloses authentication, because preflight requests have no key, and ServerErrorMiddleware, so
    that pages can read errors of any kind. The framework adds another ServerErrorMiddleware, which encloses all others;
    its responses have no CORS headers and are not logged.
    """
    access = options.access
    app.add_middleware(head_as_get)
    app.add_middleware(body_limit, max_bytes=options.limits.max_body_bytes)
    app.add_middleware(key_filter, keys=access.keys)
    app.add_middleware(ServerErrorMiddleware, handler=_respond_to_error)
    if access.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.allowed_origins,
            allow_methods=(ANY,),
            allow_headers=(ANY,),
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(host_filter, hosts=options.hosts)


def _add_routes(app: FastAPI, manager: ModelManager, admission: AdmissionController, options: ServeOptions) -> None:
    routers = (
        make_router(ENDPOINTS, EndpointCaller(manager, admission)),
        models.router(manager),
        engine.router(manager, admission),
        requests.router(manager, admission),
        health.router(manager, admission),
        file_router(),
        page_router(manager, admission, options.has_page_control),
    )
    for router in routers:
        app.routes.extend(router.routes)  # `include_router` would build them again for the first request.
    app.state.paths = sorted({route.path for route in app.routes if isinstance(route, Route)})


async def _respond_to_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):  # before the end of the body; the response is not sent
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return error_response(request.scope, *error_parts(request, error, is_admin=call_of(request).key.is_admin))
