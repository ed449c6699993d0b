"""GET /health: does the process live; GET /ready: will it answer."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.process.client import EngineState, EngineStatus
from chairlift.server.access.admission import AdmissionController
from chairlift.server.api.protocol.base import Health

STALL_SECONDS: Final = 10.0
"""Without a step for so long, while something is to be done, an engine is not ready."""


NOT_RUNNING: Final[dict[EngineState, str]] = {
    "starting": "the engine is starting",
    "restarting": "the engine died and is being started again",
    "cannot_restart": "the engine died and cannot be started again, which is tried regularly",
    "dead": "the engine is dead",
}


class ReadyStatus(BaseModel):
    """`state`: of the engine; `reason`: why the server is not ready."""

    status: str
    state: EngineState
    reason: str | None = None


class Readiness:
    """Whether requests are being answered."""

    def __init__(
        self,
        llm: AsyncLLM,
        stall_seconds: float = STALL_SECONDS,
        admission: AdmissionController | None = None,
    ) -> None:
        self._llm = llm
        self._admission = admission
        self._stall_seconds = stall_seconds

    def why_not(self) -> str | None:
        """None: it is ready."""
        if self._admission is not None and self._admission.is_draining:
            return f"the server is shutting down; {self._admission.num_calls} calls are still being answered"
        status = self._llm.status()
        if status.state != "running":
            return _why_not_running(status)
        if status.seconds_stalled < self._stall_seconds:
            return None
        unfinished = f"{status.num_unfinished} requests are unfinished"
        return f"{unfinished} and there was no step for {status.seconds_stalled:.0f} s"


def _why_not_running(status: EngineStatus) -> str:
    text = NOT_RUNNING[status.state]
    return text if status.last_failure is None else f"{text}: {status.last_failure}"


def router(llm: AsyncLLM, admission: AdmissionController | None = None) -> APIRouter:
    routes = APIRouter()
    readiness = Readiness(llm, admission=admission)

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", responses={503: {"model": Health}}, response_model_exclude_none=True)
    async def health(response: Response) -> Health:
        """The process lives, and its engine runs or is being started again: 503 if starts fail, or go on no more."""
        status = llm.status()
        if status.state == "running" or status.state == "starting":
            return Health(status="ok")
        if status.state != "restarting":
            response.status_code = 503
        return Health(status=status.state, reason=status.last_failure)

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", responses={503: {"model": ReadyStatus}})
    async def ready(response: Response) -> ReadyStatus:
        """A step has run lately, or nothing is to do."""
        if (reason := readiness.why_not()) is None:
            return ReadyStatus(status="ready", state=llm.status().state)
        response.status_code = 503
        return ReadyStatus(status="not ready", state=llm.status().state, reason=reason)

    return routes
