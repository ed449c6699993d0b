"""GET /v1/models: which model is served, and whether a request means it."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.exceptions import HTTPException

from chairlift.server.chat import ChatServing
from chairlift.server.protocol import ErrorBody, ModelCard, ModelList


class UnknownModelError(HTTPException):
    """A request for a model that is not served here."""


def check_model(asked: str | None, name: str) -> None:
    """Raises UnknownModelError unless it is this one, or any."""
    if asked is not None and asked != name:
        raise UnknownModelError(404, f"model {asked!r:.100} is not served here; {name!r} is")


def router(chat: ChatServing) -> APIRouter:
    """The routes that tell the model which the chat endpoint serves."""
    routes = APIRouter()
    longest = chat.llm.engine.scheduler_config.max_model_len
    card = ModelCard(id=chat.model_name, created=int(time.time()), max_model_len=longest)

    @routes.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[card])

    @routes.get("/v1/models/{model:path}", responses={404: {"model": ErrorBody}})
    async def get_model(model: str) -> ModelCard:
        check_model(model, chat.model_name)
        return card

    return routes
