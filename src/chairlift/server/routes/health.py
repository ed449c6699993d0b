"""GET /health: does the process live; GET /ready: will it answer."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from chairlift.engine.async_llm import AsyncLLM
from chairlift.server.admission import Admission
from chairlift.server.protocol import Health

STALL_SECONDS: Final = 10.0
"""Without a step for so long, while something is to be done, an engine is not ready."""


class Ready(BaseModel):
    """`reason`: why not."""

    status: str
    reason: str | None = None


class Readiness:
    """Whether requests are being answered."""

    def __init__(
        self,
        llm: AsyncLLM,
        stall_seconds: float = STALL_SECONDS,
        admission: Admission | None = None,
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
            return f"the engine is {status.state}"
        if status.seconds_stalled < self._stall_seconds:
            return None
        unfinished = f"{status.num_unfinished} requests are unfinished"
        return f"{unfinished} and there was no step for {status.seconds_stalled:.0f} s"


def router(llm: AsyncLLM, admission: Admission | None = None) -> APIRouter:
    routes = APIRouter()
    readiness = Readiness(llm, admission=admission)

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", responses={503: {"model": Health}})
    async def health(response: Response) -> Health:
        """The process lives, and its engine, if it died, will be started again."""
        if llm.is_healthy:
            return Health(status="ok")
        response.status_code = 503
        return Health(status="dead")

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", responses={503: {"model": Ready}})
    async def ready(response: Response) -> Ready:
        """A step has run lately, or nothing is to do."""
        if (reason := readiness.why_not()) is None:
            return Ready(status="ready")
        response.status_code = 503
        return Ready(status="not ready", reason=reason)

    return routes
