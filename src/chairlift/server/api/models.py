"""The endpoint /v1/models, and the check of the model name of a request."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.exceptions import HTTPException

from chairlift.engine.async_llm import AsyncLLM
from chairlift.server.api.protocol.base import ErrorBody, ModelCard, ModelList


class UnknownModelError(HTTPException):
    """The request names a model that this server does not serve."""

    code = "model_not_found"


def check_model(requested: str | None, name: str) -> None:
    """Raise UnknownModelError if a request names another model."""
    if requested is not None and requested != name:
        raise UnknownModelError(404, f"model {requested!r:.100} is not served here: use {name!r} or leave out model")


def router(llm: AsyncLLM, model_name: str) -> APIRouter:
    """The routes that list the served model."""
    routes = APIRouter()
    facts = llm.engine.facts
    card = ModelCard(
        id=model_name,
        created=int(time.time()),
        max_model_len=facts.scheduler_config.max_model_len,
        default_sampling_params=facts.sampling_defaults.values(),
    )

    @routes.get("/v1/models")
    async def list_models() -> ModelList:
        """List the served model (OpenAI)."""
        return ModelList(data=[card])

    @routes.get("/v1/models/{model:path}", responses={404: {"model": ErrorBody}})
    async def get_model(model: str) -> ModelCard:
        """Describe the served model (OpenAI)."""
        check_model(model, model_name)
        return card

    return routes
