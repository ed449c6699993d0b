"""The endpoints /v1/models, and those that load and unload models."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException

from chairlift.server.api.protocol.base import (
    ErrorBody,
    ModelCard,
    ModelChangeView,
    ModelList,
    ModelStatus,
    ModelSwitch,
    ModelSwitchList,
)
from chairlift.server.models.model_manager import ModelManager
from chairlift.server.models.served_model import ServedModel

ERRORS: Final[dict[int | str, dict[str, Any]]] = {status: {"model": ErrorBody} for status in (403, 404)}
SWITCH_ERRORS: Final = {**ERRORS, 409: {"model": ErrorBody}, 503: {"model": ErrorBody}}


def router(manager: ModelManager) -> APIRouter:
    """The routes that list the models, and for admin keys those that load and unload them (llama.cpp)."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def list_models(request: Request) -> ModelList:
        """List the models that the key may use, with their states (OpenAI)."""
        return ModelList(data=[model_card(model) for model in manager.visible(request.state.key)])

    @routes.get("/v1/models/{model:path}", responses=ERRORS)
    async def get_model(model: str, request: Request) -> ModelCard:
        """Describe a model (OpenAI)."""
        return model_card(manager.find(model, request.state.key))

    @routes.post("/models/load", responses=SWITCH_ERRORS)
    async def load_model(body: ModelSwitch, request: Request) -> ModelCard:
        """Load a model, and wait until it is ready."""
        _require_admin(request)
        return model_card(await manager.load(body.model, request.state.key))

    @routes.post("/models/unload", responses=SWITCH_ERRORS)
    async def unload_model(body: ModelSwitch, request: Request) -> ModelCard:
        """Unload a model that no call uses."""
        _require_admin(request)
        return model_card(await manager.unload(body.model, request.state.key))

    @routes.get("/models/changes", responses=ERRORS)
    async def list_changes(request: Request) -> ModelSwitchList:
        """List the latest loads and unloads, the oldest first."""
        _require_admin(request)
        data = [ModelChangeView.model_validate(change, from_attributes=True) for change in manager.changes]
        return ModelSwitchList(data=data, memory_bytes=manager.memory_bytes, budget_bytes=manager.limits.memory_bytes)

    return routes


def model_card(model: ServedModel) -> ModelCard:
    """The description of a model in /v1/models."""
    facts = model.facts
    return ModelCard(
        id=model.name,
        created=model.created,
        max_model_len=None if facts is None else facts.scheduler_config.max_model_len,
        default_sampling_params={} if facts is None else facts.sampling_defaults.values(),
        aliases=list(model.aliases),
        status=ModelStatus(
            value=model.state,
            reason=model.failure,
            memory_bytes=model.memory_bytes,
            num_unfinished=model.num_unfinished,
            num_waiting=model.num_waiting,
            num_loads=model.num_loads,
            load_seconds=model.load_seconds or None,
        ),
    )


def _require_admin(request: Request) -> None:
    if not request.state.key.is_admin:
        raise HTTPException(403, f"{request.url.path} changes what all keys use and needs an admin key")
