"""The HTTP application: routes and errors. Everything else is behind AsyncLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

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
from chairlift.server.admission import Admission, AdmissionMiddleware
from chairlift.server.allowed_hosts import AllowedHosts
from chairlift.server.api_options import ApiOptions
from chairlift.server.authentication import KeyMiddleware
from chairlift.server.body_limits import BodyLimitMiddleware
from chairlift.server.call_log import CallLogMiddleware
from chairlift.server.cors import CorsOptions
from chairlift.server.endpoints import Endpoints
from chairlift.server.host_check import HostMiddleware
from chairlift.server.http_errors import sentence
from chairlift.server.keys import KeyRing
from chairlift.server.limits import ServerLimits
from chairlift.server.model_check import UnknownModelError
from chairlift.server.observatory import Observatory
from chairlift.server.observe_options import ObserveOptions
from chairlift.server.preparation.preparation import Preparation, PreparationWorkers
from chairlift.server.protocol import ErrorBody, ErrorInfo
from chairlift.server.routes import (
    completions,
    engine,
    health,
    messages,
    metrics,
    models,
    requests,
    responses,
    tokenize,
)
from chairlift.server.serving import error_body, error_headers
from chairlift.server.unicode_check import check_unicode
from chairlift.server.validation import describe


def create_app(
    llm: AsyncLLM,
    served_model_name: str | None = None,
    on_ready: Callable[[], None] | None = None,
    *,
    keys: KeyRing | None = None,
    limits: ServerLimits | None = None,
    api: ApiOptions | None = None,
    observe: ObserveOptions | None = None,
    cors: CorsOptions | None = None,
    workers: PreparationWorkers | None = None,
    allowed_hosts: AllowedHosts | None = None,
) -> FastAPI:
    """The API over one engine, which is closed when the application ends.

    Args:
        served_model_name: what requests call the model; its own name if None.
        on_ready: called once requests are answered.
        keys: who may ask; everybody if None or empty.
        api: what the operator decides about the API.
        observe: who is told of each call; nobody if None.
        cors: which pages in browsers may call; none if None.
        workers: processes that prepare large bodies; if None, they are prepared on threads.
        allowed_hosts: hosts that requests may name; every host if None.

    Returns:
        the application; `app.state.admission` counts what it answers and can let it drain, `app.state.paths` are its
        endpoints.
    """
    name = served_model_name or llm.engine.model_name
    limits = limits or ServerLimits()
    keys = keys or KeyRing()
    is_fair = llm.engine.scheduler_config.scheduling_policy == "fair"
    admission = Admission(limits, keys, is_fair=is_fair)
    observatory = Observatory(llm)
    listeners = [] if observe is None else observe.listeners(observatory)
    preparation = Preparation(admission.take_cpu_seconds, workers)
    endpoints = Endpoints(llm, name, api or ApiOptions(), preparation, limits.max_json_depth)
    on_start = partial(preparation.start, endpoints.planners.conversations.check_template)
    on_end = [preparation.close, *(listener.close for listener in listeners)]
    lifespan = _lifespan(llm, [on_start] if on_ready is None else [on_ready, on_start], on_end)
    app = FastAPI(
        title="Chairlift", version=chairlift.__version__, lifespan=lifespan, dependencies=[Depends(check_unicode)]
    )
    app.state.admission = admission
    _add_middlewares(app, admission, limits, keys, cors or CorsOptions())
    app.add_middleware(HostMiddleware, allowed=allowed_hosts or AllowedHosts())
    if observe is not None:
        keeps_body = observe.access_log_bodies
        app.add_middleware(CallLogMiddleware, observatory=observatory, listeners=listeners, keeps_body=keeps_body)
    _add_error_handlers(app)
    routers = [module.router(endpoints) for module in (completions, messages, responses, tokenize)]
    routers.append(models.router(llm, name))
    routers += [module.router(observatory) for module in (engine, metrics, requests)]
    routers.append(health.router(llm, admission))
    for router in routers:
        app.include_router(router)
    app.state.paths = sorted({route.path for router in routers for route in router.routes if isinstance(route, Route)})
    return app


def _add_middlewares(
    app: FastAPI, admission: Admission, limits: ServerLimits, keys: KeyRing, cors: CorsOptions
) -> None:
    """Each around those before. Preflights come without a key, and a page may read errors of any kind: what the
    framework's own ServerErrorMiddleware, outside of all of them, answers has no CORS headers and is in no log."""
    app.add_middleware(AdmissionMiddleware, admission=admission)
    app.add_middleware(BodyLimitMiddleware, limits=limits)
    app.add_middleware(KeyMiddleware, keys=keys)
    app.add_middleware(ServerErrorMiddleware, handler=_unexpected)
    if cors.allowed_origins:
        app.add_middleware(CORSMiddleware, **cors.middleware_options())


def _lifespan(
    llm: AsyncLLM, on_start: Iterable[Callable[[], None]], on_end: Iterable[Callable[[], None]]
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        llm.open()
        for start in on_start:
            start()
        yield
        await llm.aclose()
        for close in on_end:
            close()

    return lifespan


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        message, param = describe(error)
        return _error(400, ErrorInfo(message=message, type="invalid_request_error", param=param))

    @app.exception_handler(ChairliftError)
    async def refused(_request: Request, error: ChairliftError) -> JSONResponse:
        status, body = error_body(error)
        return _error(status, body.error, error_headers(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = "model_not_found" if isinstance(error, UnknownModelError) else None
        info = ErrorInfo(message=sentence(request, error), type="invalid_request_error", code=code)
        return _error(error.status_code, info, error.headers)


async def _unexpected(_request: Request, error: Exception) -> JSONResponse:
    status, body = error_body(error)
    return _error(status, body.error)


def _error(status: int, info: ErrorInfo, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(ErrorBody(error=info).model_dump(), status_code=status, headers=headers)
