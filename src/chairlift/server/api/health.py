"""GET /health: whether the server has to be replaced; GET /ready: whether it can answer requests."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.process.client import EngineState
from chairlift.server.access.admission import AdmissionController
from chairlift.server.api.protocol.base import Health

STALL_SECONDS: Final = 10.0
"""An engine with unfinished requests is not ready after this time without a step."""

NOT_RUNNING: Final[dict[EngineState, str]] = {
    "starting": "the engine is starting",
    "restarting": "the engine died and is restarting",
    "cannot_restart": "the engine died and cannot be restarted; the server tries again regularly",
    "dead": "the engine is dead",
}


class ReadyStatus(BaseModel):
    """The readiness of the server, with the state of the engine and the reason if it is not ready."""

    status: str
    state: EngineState
    reason: str | None = None


def readiness_obstacle(llm: AsyncLLM, admission: AdmissionController) -> str | None:
    """The reason why the server cannot answer requests; None if it can."""
    if admission.is_draining:
        return f"the server is shutting down and has {admission.num_calls} unfinished calls"
    status = llm.status()
    if status.state != "running":
        text = NOT_RUNNING[status.state]
        return text if status.last_failure is None else f"{text}: {status.last_failure}"
    if status.seconds_stalled < STALL_SECONDS:
        return None
    return f"no step for {status.seconds_stalled:.0f} seconds with {status.num_unfinished} unfinished requests"


def router(llm: AsyncLLM, admission: AdmissionController) -> APIRouter:
    """The routes that a load balancer or an orchestrator checks."""
    routes = APIRouter()

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", responses={503: {"model": Health}}, response_model_exclude_none=True)
    async def health(response: Response) -> Health:
        """Return 200 while the engine runs or restarts, and 503 if it cannot be restarted."""
        status = llm.status()
        if status.state == "running" or status.state == "starting":
            return Health(status="ok")
        if status.state != "restarting":
            response.status_code = 503
        return Health(status=status.state, reason=status.last_failure)

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", responses={503: {"model": ReadyStatus}})
    async def ready(response: Response) -> ReadyStatus:
        """Return 200 if the engine runs and, while it has unfinished requests, computes steps."""
        if (reason := readiness_obstacle(llm, admission)) is None:
            return ReadyStatus(status="ready", state=llm.status().state)
        response.status_code = 503
        return ReadyStatus(status="not ready", state=llm.status().state, reason=reason)

    return routes
