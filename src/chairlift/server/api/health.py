"""GET /health, /ping: whether the server has to be replaced; GET /ready: whether it can answer; GET /version."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from chairlift.counts import counted
from chairlift.engine.process.client import EngineState, EngineStatus
from chairlift.server.access.admission import AdmissionController
from chairlift.server.access.call import call_of
from chairlift.server.models.model_manager import ModelManager
from chairlift.version import __version__

STALL_SECONDS: Final = 10.0
"""An engine with unfinished requests is not ready after this time without a step."""
HEALTH_ORDER: Final = ("running", "starting", "unloaded", "restarting", "cannot_restart", "dead")
"""The states of engines from the best to the worst."""

NOT_RUNNING: Final[dict[EngineState, str]] = {
    "starting": "the engine is starting",
    "restarting": "the engine died and is restarting",
    "cannot_restart": "the engine died and cannot be restarted; the server tries again regularly",
    "dead": "the engine is dead",
}
"""The states in which an engine does not serve requests. A model without an engine is loaded by its next call."""


class Health(BaseModel):
    """The state of the engine."""

    status: Literal["ok", "restarting", "cannot_restart", "dead"]
    reason: Annotated[str | None, Field(description="Why the engine died; null if `status` is `ok`.")] = None


class ReadyStatus(BaseModel):
    """The readiness of the server, with the state of the engine and the reason if it is not ready."""

    status: str
    state: EngineState
    reason: str | None = None


def readiness(manager: ModelManager, admission: AdmissionController, *, is_admin: bool) -> tuple[bool, str | None]:
    """Whether the server can answer requests of any model, and why it cannot answer requests of all models. Only for
    an admin, the reason may contain the failure of an engine, which names files of the server."""
    if admission.is_draining:
        return False, f"the server is shutting down and has {counted(admission.num_calls, 'unfinished call')}"
    obstacles = [engine_obstacle(model.status(), is_admin=is_admin) for model in manager.models]
    found = [each for each in obstacles if each is not None]
    if not found or len(found) == len(obstacles):
        return not found, found[0] if found else None
    return True, f"{len(found)} of {len(obstacles)} models cannot answer requests: {found[0]}"


def engine_obstacle(status: EngineStatus, *, is_admin: bool) -> str | None:
    """The reason why an engine cannot answer requests; None if it can, or if the next request loads its model."""
    if status.state == "unloaded":
        return None
    if status.state != "running":
        text = NOT_RUNNING[status.state]
        return text if status.last_failure is None or not is_admin else f"{text}: {status.last_failure}"
    if status.seconds_stalled < STALL_SECONDS:
        return None
    return f"no step for {status.seconds_stalled:.0f} seconds with {status.num_unfinished} unfinished requests"


def router(manager: ModelManager, admission: AdmissionController) -> APIRouter:
    """The routes that a load balancer or an orchestrator checks."""
    routes = APIRouter(tags=["Health"])

    @routes.api_route("/ping", methods=["GET", "POST"], include_in_schema=False, response_model_exclude_none=True)
    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", responses={503: {"model": Health}}, response_model_exclude_none=True)
    async def health(request: Request, response: Response) -> Health:
        """Return 200 while an engine runs or restarts or can be started, and 503 if none can be restarted."""
        statuses = [model.status() for model in manager.models]
        status = min(statuses, key=lambda status: HEALTH_ORDER.index(status.state))
        if status.state == "running" or status.state == "starting" or status.state == "unloaded":
            return Health(status="ok")
        if status.state != "restarting":
            response.status_code = 503
        return Health(status=status.state, reason=status.last_failure if call_of(request).key.is_admin else None)

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", responses={503: {"model": ReadyStatus}})
    async def ready(request: Request, response: Response) -> ReadyStatus:
        """Return 200 if an engine runs and, while it has unfinished requests, computes steps, or can be started. The
        reason is also given if some of several models cannot answer requests."""
        state = manager.default.status().state
        is_ready, reason = readiness(manager, admission, is_admin=call_of(request).key.is_admin)
        if not is_ready:
            response.status_code = 503
        return ReadyStatus(status="ready" if is_ready else "not ready", state=state, reason=reason)

    @routes.get("/version")
    async def get_version() -> dict[str, str]:
        """Return the version of the server (vLLM)."""
        return {"version": __version__}

    return routes
