"""GET /v1/requests, /v1/requests/{id} and /v1/requests/{id}/explain."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException

from chairlift.engine.what_if import what_ifs
from chairlift.metrics.tracked_request import TrackedRequest
from chairlift.server.observatory import Observatory
from chairlift.server.protocol import ErrorBody
from chairlift.server.request_views import (
    ExplanationView,
    RequestList,
    RequestView,
    SequenceView,
    explanation_view,
    sequence_view,
)

UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"model": ErrorBody}}


def router(observatory: Observatory) -> APIRouter:
    """A key sees the requests of its own tenant; an admin's sees all."""
    routes = APIRouter()

    @routes.get("/v1/requests")
    async def list_requests(request: Request) -> RequestList:
        """The unfinished ones, by arrival."""
        viewer = observatory.viewer(request)
        found = (entry for entry in observatory.tracker.requests() if entry.state in ("waiting", "running"))
        return RequestList(data=[_view(observatory, entry) for entry in found if viewer.may_see(entry.tenant)])

    @routes.get("/v1/requests/{request_id}", responses=UNKNOWN)
    async def get_request(request_id: str, request: Request) -> RequestView:
        found = _find(observatory, request_id, request)
        return RequestView(id=request_id, sequences=[_view(observatory, entry) for entry in found])

    @routes.get("/v1/requests/{request_id}/explain", responses={**UNKNOWN, 429: {"model": ErrorBody}})
    async def explain_request(request_id: str, request: Request) -> ExplanationView:
        """Counts as one of a minute's requests of its key: what would have let a request in takes time to find."""
        request.state.admission.ask(request.state.key)
        found = _find(observatory, request_id, request)
        explainer, viewer = observatory.explainer, observatory.viewer(request)
        refusals = [explainer.refusal(entry) for entry in found]
        ways = await asyncio.to_thread(lambda: [[] if refusal is None else what_ifs(refusal) for refusal in refusals])
        now = observatory.now()
        explained = (explainer.explain(entry, viewer, now, its) for entry, its in zip(found, ways, strict=True))
        return ExplanationView(id=request_id, sequences=[explanation_view(entry) for entry in explained])

    return routes


def _find(observatory: Observatory, request_id: str, request: Request) -> list[TrackedRequest]:
    if found := observatory.find(request_id, observatory.viewer(request)):
        return found
    why = "it ended too long ago, never got to the engine, or is another key's"
    raise HTTPException(404, f"request {request_id!r:.140} is not known: {why}")


def _view(observatory: Observatory, entry: TrackedRequest) -> SequenceView:
    now = observatory.now()
    return sequence_view(entry, observatory.tracker.spans(entry, now), now)
