"""The HTTP application: endpoints, middlewares and error handlers over one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.responses import JSONResponse
from starlette.routing import Route

import chairlift
from chairlift.engine.async_llm import AsyncLLM
from chairlift.errors import ChairliftError
from chairlift.server.access.admission import AdmissionController
from chairlift.server.access.authentication import KeyMiddleware
from chairlift.server.access.keys import KeyRing
from chairlift.server.access.server_limits import ServerLimits
from chairlift.server.api import engine, health, messages, models, requests
from chairlift.server.api.api_options import ApiOptions
from chairlift.server.api.body_routes import body_routers, make_endpoints, prepared_route_class
from chairlift.server.api.conversation import ConversationPlanner
from chairlift.server.http.allowed_hosts import AllowedHosts
from chairlift.server.http.body_limits import BodyLimitMiddleware
from chairlift.server.http.cors import CorsOptions
from chairlift.server.http.error_responses import describe_error, error_response
from chairlift.server.http.host_check import HostMiddleware
from chairlift.server.http.unicode_check import check_unicode
from chairlift.server.preparation.planners import make_planners
from chairlift.server.preparation.preparation import Preparation, PreparationWorkers
from chairlift.server.telemetry.call_log import CallLogMiddleware
from chairlift.server.telemetry.engine_observer import EngineObserver
from chairlift.server.telemetry.observability_options import ObservabilityOptions
from chairlift.server.web.live_feed import LiveFeed
from chairlift.server.web.page_options import PageOptions
from chairlift.server.web.page_routes import data_router, file_router


def create_app(
    llm: AsyncLLM,
    served_model_name: str | None = None,
    on_ready: Callable[[], None] | None = None,
    *,
    keys: KeyRing | None = None,
    limits: ServerLimits | None = None,
    api: ApiOptions | None = None,
    observability: ObservabilityOptions | None = None,
    cors: CorsOptions | None = None,
    workers: PreparationWorkers | None = None,
    allowed_hosts: AllowedHosts | None = None,
    pages: PageOptions | None = None,
) -> FastAPI:
    """Create the application that serves the API over one engine. It closes the engine when it shuts down.

    Args:
        served_model_name: The name of the model in requests and responses. Default: the model's own name.
        on_ready: Called when the application accepts requests.
        keys: The API keys. Without keys every request is accepted.
        limits: The limits of the server. Default: `ServerLimits()`.
        api: The options of the API. Default: `ApiOptions()`.
        observability: The access log and traces. Default: none.
        cors: The origins whose pages may call the API from a browser. Default: none.
        workers: Processes that prepare large bodies. Without them all bodies are prepared on threads.
        allowed_hosts: The hosts that requests may name. Default: every host.
        pages: The options of the live page. Default: `PageOptions()`.

    Returns:
        The application. `app.state.admission` counts the calls in progress and can drain the server.
        `app.state.paths` lists the paths of the endpoints.
    """
    name = served_model_name or llm.engine.facts.model_name
    limits = limits or ServerLimits()
    keys = keys or KeyRing()
    is_fair = llm.engine.facts.scheduler_config.scheduling_policy == "fair"
    admission = AdmissionController(limits, keys, is_fair=is_fair)
    observer = EngineObserver(llm)
    feed = LiveFeed(observer.tracker)
    llm.events.add(feed)
    listeners = [] if observability is None else observability.listeners(observer)
    preparation = Preparation(admission.record_cpu_seconds, workers)
    admission.stop_preparation = preparation.stop
    conversations = ConversationPlanner(llm.engine, api or ApiOptions())

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        llm.open()
        if on_ready is not None:
            on_ready()
        preparation.start(conversations.log_template_warnings)
        yield
        await llm.aclose()
        preparation.close()
        feed.close()
        for listener in listeners:
            listener.close()

    app = FastAPI(
        title="Chairlift",
        version=chairlift.__version__,
        lifespan=lifespan,
        dependencies=[Depends(check_unicode)],
        docs_url=None,
        redoc_url=None,
    )
    app.state.admission = admission
    _add_middlewares(app, limits, keys, cors or CorsOptions())
    app.add_middleware(HostMiddleware, allowed=allowed_hosts or AllowedHosts())
    if observability is not None:
        has_body = observability.access_log_bodies
        app.add_middleware(CallLogMiddleware, observer=observer, listeners=listeners, has_body=has_body)
    for kind in (RequestValidationError, ChairliftError, HTTPException):
        app.add_exception_handler(kind, _respond_to_error)
    endpoints = make_endpoints(llm, name, make_planners(llm.engine, conversations), preparation)
    routers = body_routers(endpoints, prepared_route_class(endpoints, preparation, limits.max_json_depth))
    routers += [models.router(llm, name), engine.router(observer), requests.router(observer)]
    routers += [health.router(llm, admission), file_router()]
    routers.append(data_router(observer, feed, admission, name, pages or PageOptions()))
    for router in routers:
        app.include_router(router)
    app.state.paths = sorted({route.path for router in routers for route in router.routes if isinstance(route, Route)})
    return app


def _add_middlewares(app: FastAPI, limits: ServerLimits, keys: KeyRing, cors: CorsOptions) -> None:
    """Add the middlewares. Each one encloses those that were added before it.

    The CORS middleware encloses authentication, because preflight requests have no key, and ServerErrorMiddleware, so
    that pages can read errors of any kind. The framework adds another ServerErrorMiddleware, which encloses all others;
    its responses have no CORS headers and are not logged.
    """
    app.add_middleware(BodyLimitMiddleware, limits=limits)
    app.add_middleware(KeyMiddleware, keys=keys)
    app.add_middleware(ServerErrorMiddleware, handler=_respond_to_error)
    if cors.allowed_origins:
        app.add_middleware(CORSMiddleware, **cors.middleware_options())


async def _respond_to_error(request: Request, error: Exception) -> JSONResponse:
    status, info, headers = describe_error(request, error)
    if request.method == "POST" and request.url.path in messages.PATHS:
        return messages.messages_error_response(status, info.message, headers)
    return error_response(status, info, headers)
