"""The HTTP application: routes and errors. Everything else is behind AsyncLLM."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

import chairlift
from chairlift.engine.async_llm import AsyncLLM
from chairlift.errors import ChairliftError
from chairlift.server.admission import Admission, AdmissionMiddleware
from chairlift.server.authentication import KeyMiddleware
from chairlift.server.body_limits import BodyLimitMiddleware
from chairlift.server.chat import ChatServing
from chairlift.server.completions import CompletionServing
from chairlift.server.keys import KeyRing
from chairlift.server.limits import ServerLimits
from chairlift.server.observatory import Observatory
from chairlift.server.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    ErrorBody,
    ErrorInfo,
    ModelCard,
    ModelList,
    SamplingFields,
)
from chairlift.server.routes import engine, health, metrics, requests
from chairlift.server.serving import error_body, error_headers

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody},
    401: {"model": ErrorBody},
    404: {"model": ErrorBody},
    408: {"model": ErrorBody},
    413: {"model": ErrorBody},
    429: {"model": ErrorBody},
    503: {"model": ErrorBody},
}


def create_app(
    llm: AsyncLLM,
    served_model_name: str | None = None,
    on_ready: Callable[[], None] | None = None,
    *,
    keys: KeyRing | None = None,
    limits: ServerLimits | None = None,
) -> FastAPI:
    """The API over one engine, which is closed when the application ends.

    Args:
        served_model_name: what requests call the model; its own name if None.
        on_ready: called once requests are answered.
        keys: who may ask; everybody if None or empty.

    Returns:
        the application; `app.state.admission` counts what it answers and can let it drain.
    """
    name = served_model_name or llm.engine.model_name
    limits = limits or ServerLimits()
    keys = keys or KeyRing()
    is_fair = llm.engine.scheduler_config.scheduling_policy == "fair"
    admission = Admission(limits, keys, is_fair=is_fair)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        llm.open()
        if on_ready is not None:
            on_ready()
        yield
        llm.close()

    app = FastAPI(title="Chairlift", version=chairlift.__version__, lifespan=lifespan)
    app.state.admission = admission
    app.add_middleware(AdmissionMiddleware, admission=admission)
    app.add_middleware(BodyLimitMiddleware, limits=limits)
    app.add_middleware(KeyMiddleware, keys=keys)
    _add_error_handlers(app)
    _add_routes(app, llm, name)
    observatory = Observatory(llm)
    for module in (engine, metrics, requests):
        app.include_router(module.router(observatory))
    app.include_router(health.router(llm, admission))
    return app


def _add_routes(app: FastAPI, llm: AsyncLLM, name: str) -> None:
    completions = CompletionServing(llm, name)
    chat = ChatServing(llm, name)
    started = int(time.time())
    card = ModelCard(id=name, created=started, max_model_len=llm.engine.scheduler_config.max_model_len)

    @app.post("/v1/completions", response_model=Completion, responses=ERRORS)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        _check_model(body, name)
        return await completions.handle(body, request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=ERRORS)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        _check_model(body, name)
        return await chat.handle(body, request)

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[card])

    @app.get("/v1/models/{model:path}", responses={404: {"model": ErrorBody}})
    async def get_model(model: str) -> ModelCard:
        if model != name:
            raise _no_such_model(model, name)
        return card


def _check_model(body: SamplingFields, name: str) -> None:
    if body.model is not None and body.model != name:
        raise _no_such_model(body.model, name)


class UnknownModelError(HTTPException):
    """A request for a model that is not served here."""


def _no_such_model(model: str, name: str) -> UnknownModelError:
    return UnknownModelError(404, f"model {model!r} is not served here; {name!r} is")


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        message, param = _describe(error)
        return _error(400, ErrorInfo(message=message, type="invalid_request_error", param=param))

    @app.exception_handler(ChairliftError)
    async def refused(_request: Request, error: ChairliftError) -> JSONResponse:
        status, body = error_body(error)
        return _error(status, body.error, error_headers(error))

    @app.exception_handler(HTTPException)
    async def http_error(_request: Request, error: HTTPException) -> JSONResponse:
        code = "model_not_found" if isinstance(error, UnknownModelError) else None
        info = ErrorInfo(message=str(error.detail), type="invalid_request_error", code=code)
        return _error(error.status_code, info, error.headers)

    @app.exception_handler(Exception)
    async def unexpected(_request: Request, error: Exception) -> JSONResponse:
        status, body = error_body(error)
        return _error(status, body.error)


def _error(status: int, info: ErrorInfo, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(ErrorBody(error=info).model_dump(), status_code=status, headers=headers)


def _describe(error: RequestValidationError) -> tuple[str, str | None]:
    """One sentence for each field that is wrong, and the first one's name."""
    problems: dict[str, list[str]] = {}
    for problem in error.errors():
        where = [str(part) for part in problem["loc"][1:]]
        field = where[0] if where else "body"
        if problem["type"] == "json_invalid":
            return f"the body is not valid JSON: {problem['ctx']['error']}", None
        if problem["type"] == "extra_forbidden":
            sentence = "unknown or not supported here; leave it out"
        else:
            sentence = f"{problem['msg']}, got {problem['input']!r:.80}"
        problems.setdefault(field, []).append(f"{'.'.join(where) or field}: {sentence}")
    return "; or ".join(next(iter(problems.values()))), next(iter(problems))
