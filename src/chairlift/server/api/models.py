"""GET /v1/models: which model is served, and whether a request means it."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.exceptions import HTTPException

from chairlift.engine.async_llm import AsyncLLM
from chairlift.server.api.protocol import ErrorBody, ModelCard, ModelList


class UnknownModelError(HTTPException):
    """A request for a model that is not served here."""


def check_model(requested: str | None, name: str) -> None:
    """Raises UnknownModelError unless a request names this model, or none."""
    if requested is not None and requested != name:
        raise UnknownModelError(404, f"model {requested!r:.100} is not served here; {name!r} is")


def router(llm: AsyncLLM, model_name: str) -> APIRouter:
    """The routes that list the served model."""
    routes = APIRouter()
    longest = llm.engine.scheduler_config.max_model_len
    card = ModelCard(id=model_name, created=int(time.time()), max_model_len=longest)

    @routes.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[card])

    @routes.get("/v1/models/{model:path}", responses={404: {"model": ErrorBody}})
    async def get_model(model: str) -> ModelCard:
        check_model(model, model_name)
        return card

    return routes
