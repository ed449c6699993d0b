"""The endpoints /v1/models, and those that load and unload models and LoRA adapters."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, get_type_hints

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from chairlift.server.access.call import call_of, require_admin
from chairlift.server.access.keys import Key
from chairlift.server.api.routes import add_body_route, read_body
from chairlift.server.http.error_responses import error_models
from chairlift.server.http.streaming import cancel_on_disconnect
from chairlift.server.models.model_manager import ModelManager
from chairlift.server.models.served_model import ModelState, ServedModel
from chairlift.server.protocol.base import RequestBody
from chairlift.server.protocol.sampling import CallFields
from chairlift.system.log_format import format_time
from chairlift.version import __version__


class ModelStatus(BaseModel):
    """The state of a model, as in llama.cpp's server with several models.

    `reason` is the error of the last load that failed. `memory_bytes` is the memory of its engine process; 0 if it is
    not loaded or has several processes.
    """

    value: ModelState
    reason: str | None
    memory_bytes: int
    num_unfinished: int
    num_waiting: int
    num_loads: int
    load_seconds: float | None


class ModelCard(BaseModel):
    """A model in /v1/models, with the fields of OpenAI, and with `type`, `display_name` and `created_at` of Anthropic.
    `max_model_len` is null until the model has been loaded for the first time."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: str
    owned_by: str = "chairlift"
    root: str | None = Field(
        None,
        description="The repository on the Hugging Face hub from which the model was loaded; for admin keys a path.",
    )
    parent: str | None = Field(None, description="The model that a LoRA adapter is for; null for a model.")
    max_model_len: int | None
    default_sampling_params: dict[str, float | int] = Field(
        {}, description="The sampling parameters of requests that do not set them; see --generation-config."
    )

    aliases: list[str] = Field([], description="Other names of the model in requests.")
    status: ModelStatus


class ServerInfo(BaseModel):
    """What sglang-router and sglang's benchmark read of a server, with the names of SGLang. The fields of a model that
    has not been loaded yet are null."""

    model_path: str | None = Field(description="The `root` of the model in /v1/models.")
    served_model_name: str
    context_length: int | None
    version: str = __version__


class ModelInfo(BaseModel):
    """What sglang-router and sglang's benchmark read of a model, with the names of SGLang."""

    model_path: str | None
    tokenizer_path: str | None
    is_generation: bool | None
    model_type: str | None


class ModelSwitch(RequestBody):
    """The model that /models/load or /models/unload changes."""

    model: str


class AdapterLoad(RequestBody):
    """The LoRA adapter that /v1/load_lora_adapter loads."""

    lora_name: str = Field(min_length=1, max_length=256, description="The name that calls use as `model`.")
    lora_path: str = Field(min_length=1, max_length=4096, description="A PEFT folder on the machine of the server.")
    model: str | None = Field(None, description="The model that it is for. Default: the first model of the key.")


class AdapterUnload(RequestBody):
    """The LoRA adapter that /v1/unload_lora_adapter unloads."""

    lora_name: str


class AdapterDeleted(BaseModel):
    """The answer of /v1/unload_lora_adapter."""

    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: Literal[False] = False


def router(manager: ModelManager) -> APIRouter:
    """The routes that list the models, and for admin keys those that load and unload them (llama.cpp)."""
    routes = APIRouter(tags=["Models"])

    @routes.get("/v1/models/", include_in_schema=False)
    @routes.get("/v1/models")
    async def list_models(request: Request) -> ModelList:
        """List the models that the key may use, with their states (OpenAI)."""
        key = call_of(request).key
        models = manager.visible(key)
        return ModelList(data=[model_card(model, key, name) for model in models for name in (None, *model.adapters)])

    @routes.get("/v1/models/{model:path}", responses=error_models(403, 404))
    async def get_model(model: str, request: Request) -> ModelCard:
        """Describe a model (OpenAI)."""
        found = manager.find(model, call_of(request).key)
        return model_card(found, call_of(request).key, found.adapter_of(model))

    @routes.get("/server_info", responses=error_models(403, 404))
    async def get_server_info(request: Request, model: str | None = None) -> ServerInfo:
        """Describe the server by one of its models (SGLang)."""
        key = call_of(request).key
        found = manager.find(model, key)
        length = None if found.facts is None else found.facts.scheduler_config.max_model_len
        return ServerInfo(model_path=visible_root(found, key), served_model_name=found.name, context_length=length)

    @routes.get("/model_info", responses=error_models(403, 404))
    async def get_model_info(request: Request, model: str | None = None) -> ModelInfo:
        """Describe a model (SGLang)."""
        key = call_of(request).key
        found = manager.find(model, key)
        root, facts = visible_root(found, key), found.facts
        return ModelInfo(
            model_path=root,
            tokenizer_path=root,
            is_generation=None if facts is None else facts.pooling is None,
            model_type=None if facts is None else facts.model_config.name,
        )

    @routes.get("/tokenizer_info", responses=error_models(403, 404, 429, 503))
    async def get_tokenizer_info(request: Request, model: str | None = None) -> dict[str, str | None]:
        """Return the special tokens and the chat template of a model (vLLM), which lm-eval reads."""

        async def read() -> dict[str, str | None]:
            with await manager.lease("", CallFields.model_validate({"model": model}), call_of(request)) as lease:
                return lease.service.planner.tokenizer_info()

        await request.body()
        return await cancel_on_disconnect(request.receive, read())

    _add_admin_routes(routes, manager)
    return routes


def _add_admin_routes(routes: APIRouter, manager: ModelManager) -> None:
    async def load_model(body: ModelSwitch, key: Key) -> ModelCard:
        """Load a model, and wait until it is ready."""
        return model_card(await manager.load(body.model, key), key)

    async def unload_model(body: ModelSwitch, key: Key) -> ModelCard:
        """Unload a model that no call uses."""
        return model_card(await manager.unload(body.model, key), key)

    async def load_lora_adapter(body: AdapterLoad, key: Key) -> ModelCard:
        """Load a LoRA adapter, which calls select by its name as `model` (vLLM)."""
        model = await manager.load_adapter(body.lora_name, body.lora_path, body.model, key)
        return model_card(model, key, body.lora_name)

    async def unload_lora_adapter(body: AdapterUnload, key: Key) -> AdapterDeleted:
        """Unload a LoRA adapter, and wait until its last request has ended (vLLM)."""
        await manager.unload_adapter(body.lora_name, key)
        return AdapterDeleted(id=body.lora_name)

    _add_admin_route(routes, "/models/load", load_model)
    _add_admin_route(routes, "/models/unload", unload_model)
    _add_admin_route(routes, "/v1/load_lora_adapter", load_lora_adapter)
    _add_admin_route(routes, "/v1/unload_lora_adapter", unload_lora_adapter)


def _add_admin_route(routes: APIRouter, path: str, change: Callable[[Any, Key], Awaitable[BaseModel]]) -> None:
    """Add a route of admin keys that calls `change`, whose name, docstring and types describe it."""
    types, name = get_type_hints(change), getattr(change, "__name__", path)

    async def handle(request: Request) -> Response:
        require_admin(request, "changes what all keys use")
        result = await change(await read_body(request, types["body"]), call_of(request).key)
        return JSONResponse(result.model_dump())

    described = {"name": name, "description": change.__doc__, "responses": error_models(400, 403, 404, 409, 503)}
    add_body_route(routes, path, handle, types["body"], types["return"], **described)


def visible_root(model: ServedModel, key: Key) -> str | None:
    """The repository from which a model was loaded, or for admin keys the path; None if it is not visible."""
    root = None if model.facts is None else model.facts.root
    return root if root is None or key.is_admin or not Path(root).is_absolute() else None


def model_card(model: ServedModel, key: Key, adapter: str | None = None) -> ModelCard:
    """The description of a model, or of one of its LoRA adapters, in /v1/models."""
    facts = model.facts
    return ModelCard(
        id=adapter or model.name,
        display_name=adapter or model.name,
        root=visible_root(model, key),
        parent=None if adapter is None else model.name,
        created=model.created,
        created_at=format_time(model.created),
        max_model_len=None if facts is None else facts.scheduler_config.max_model_len,
        default_sampling_params={} if facts is None else facts.sampling_defaults.values(),
        aliases=list(model.spec.aliases) if adapter is None else [],
        status=ModelStatus(
            value=model.state,
            reason=None if model.failure is None else model.failure.texts[not key.is_admin],
            memory_bytes=model.memory_bytes,
            num_unfinished=model.num_unfinished,
            num_waiting=model.num_waiting,
            num_loads=model.num_loads,
            load_seconds=model.load_seconds or None,
        ),
    )
