"""The HTTP application: endpoints, middlewares and error handlers over one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.responses import JSONResponse
from starlette.routing import Route

import chairlift
from chairlift.engine.async_llm import AsyncLLM
from chairlift.errors import ChairliftError
from chairlift.server.access.admission import AdmissionController, AdmissionMiddleware
from chairlift.server.access.authentication import KeyMiddleware
from chairlift.server.access.keys import KeyRing
from chairlift.server.access.server_limits import ServerLimits
from chairlift.server.api import (
    chat,
    completions,
    engine,
    health,
    messages,
    metrics,
    models,
    requests,
    responses,
    tokenization,
)
from chairlift.server.api.api_options import ApiOptions
from chairlift.server.api.prepared_route import PreparedRoutes
from chairlift.server.api.protocol.base import ErrorBody, ErrorInfo
from chairlift.server.api.serving import UtilityServing
from chairlift.server.http.allowed_hosts import AllowedHosts
from chairlift.server.http.body_limits import BodyLimitMiddleware
from chairlift.server.http.cors import CorsOptions
from chairlift.server.http.error_responses import (
    describe_validation_error,
    error_body,
    error_headers,
    http_error_message,
)
from chairlift.server.http.host_check import HostMiddleware
from chairlift.server.http.unicode_check import check_unicode
from chairlift.server.preparation.planners import EndpointPlanners, make_planners
from chairlift.server.preparation.preparation import Preparation, PreparationWorkers
from chairlift.server.telemetry.call_log import CallLogMiddleware
from chairlift.server.telemetry.engine_observer import EngineObserver
from chairlift.server.telemetry.observability_options import ObservabilityOptions


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
) -> FastAPI:
    """The API over one engine, which is closed when the application shuts down.

    Args:
        served_model_name: the name of the model in requests and responses; by default the model's own name.
        on_ready: called when the application accepts requests.
        keys: the API keys; without keys every request is accepted.
        api: options of the API.
        observability: the access log and traces; none by default.
        cors: the web pages that may call the API from a browser; none by default.
        workers: processes that prepare large bodies; without them, bodies are prepared on threads.
        allowed_hosts: the hosts that requests may name; every host by default.

    Returns:
        The application. `app.state.admission` counts the calls in progress and can drain the server;
        `app.state.paths` lists the paths of the endpoints.
    """
    name = served_model_name or llm.engine.model_name
    limits = limits or ServerLimits()
    keys = keys or KeyRing()
    is_fair = llm.engine.scheduler_config.scheduling_policy == "fair"
    admission = AdmissionController(limits, keys, is_fair=is_fair)
    observer = EngineObserver(llm)
    listeners = [] if observability is None else observability.listeners(observer)
    preparation = Preparation(admission.record_cpu_seconds, workers)
    admission.stop_preparation = preparation.stop
    planners = make_planners(llm.engine, api or ApiOptions())
    on_start = partial(preparation.start, planners.conversations.log_template_warnings)
    on_end = [preparation.close, *(listener.close for listener in listeners)]
    lifespan = _lifespan(llm, [on_start] if on_ready is None else [on_ready, on_start], on_end)
    app = FastAPI(
        title="Chairlift", version=chairlift.__version__, lifespan=lifespan, dependencies=[Depends(check_unicode)]
    )
    app.state.admission = admission
    _add_middlewares(app, admission, limits, keys, cors or CorsOptions())
    app.add_middleware(HostMiddleware, allowed=allowed_hosts or AllowedHosts())
    if observability is not None:
        has_body = observability.access_log_bodies
        app.add_middleware(CallLogMiddleware, observer=observer, listeners=listeners, has_body=has_body)
    _add_error_handlers(app)
    routers = _generation_routers(llm, name, planners, preparation, limits.max_json_depth)
    routers.append(models.router(llm, name))
    routers += [module.router(observer) for module in (engine, metrics, requests)]
    routers.append(health.router(llm, admission))
    for router in routers:
        app.include_router(router)
    app.state.paths = sorted({route.path for router in routers for route in router.routes if isinstance(route, Route)})
    return app


def _generation_routers(
    llm: AsyncLLM, name: str, planners: EndpointPlanners, preparation: Preparation, max_json_depth: int
) -> list[APIRouter]:
    """The routers of the endpoints that take a body."""
    prepared = PreparedRoutes(preparation, max_json_depth)
    completion_serving = completions.CompletionServing(llm, name, planners.completions, preparation)
    chat_serving = chat.ChatServing(llm, name, planners.chat, preparation)
    messages_serving = messages.MessagesServing(llm, name, planners.messages, preparation)
    responses_serving = responses.ResponsesServing(llm, name, planners.responses, preparation)
    count_tokens = UtilityServing(name, planners.count_tokens, preparation)
    tokenize = UtilityServing(name, planners.tokenize, preparation)
    detokenize = UtilityServing(name, planners.detokenize, preparation)
    return [
        completions.router(completion_serving, prepared),
        chat.router(chat_serving, prepared),
        messages.router(messages_serving, count_tokens, prepared),
        responses.router(responses_serving, prepared),
        tokenization.router(tokenize, detokenize, prepared),
    ]


def _add_middlewares(
    app: FastAPI, admission: AdmissionController, limits: ServerLimits, keys: KeyRing, cors: CorsOptions
) -> None:
    """Add the middlewares; each one encloses those added before it.

    The CORS middleware encloses authentication, because preflight requests have no key, and encloses
    ServerErrorMiddleware, because pages may read errors of any kind. Responses of the framework's own
    ServerErrorMiddleware, which encloses all others, have no CORS headers and are not logged.
    """
    app.add_middleware(AdmissionMiddleware, admission=admission)
    app.add_middleware(BodyLimitMiddleware, limits=limits)
    app.add_middleware(KeyMiddleware, keys=keys)
    app.add_middleware(ServerErrorMiddleware, handler=_answer_unexpected_error)
    if cors.allowed_origins:
        app.add_middleware(CORSMiddleware, **cors.middleware_options())


def _lifespan(
    llm: AsyncLLM, on_start: Iterable[Callable[[], None]], on_shutdown: Iterable[Callable[[], None]]
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        llm.open()
        for start in on_start:
            start()
        yield
        await llm.aclose()
        for close in on_shutdown:
            close()

    return lifespan


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def answer_validation_error(_request: Request, error: RequestValidationError) -> JSONResponse:
        message, param = describe_validation_error(error)
        return _error_response(400, ErrorInfo(message=message, type="invalid_request_error", param=param))

    @app.exception_handler(ChairliftError)
    async def answer_chairlift_error(_request: Request, error: ChairliftError) -> JSONResponse:
        status, body = error_body(error)
        return _error_response(status, body.error, error_headers(error))

    @app.exception_handler(HTTPException)
    async def answer_http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = "model_not_found" if isinstance(error, models.UnknownModelError) else None
        info = ErrorInfo(message=http_error_message(request, error), type="invalid_request_error", code=code)
        return _error_response(error.status_code, info, error.headers)


async def _answer_unexpected_error(_request: Request, error: Exception) -> JSONResponse:
    status, body = error_body(error)
    return _error_response(status, body.error)


def _error_response(status: int, info: ErrorInfo, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(ErrorBody(error=info).model_dump(), status_code=status, headers=headers)
