"""GET /v1/models: which model is served, and whether a request means it."""

from __future__ import annotations

import time

from fastapi import APIRouter

from chairlift.engine.async_llm import AsyncLLM
from chairlift.server.model_check import check_model
from chairlift.server.protocol import ErrorBody, ModelCard, ModelList


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
