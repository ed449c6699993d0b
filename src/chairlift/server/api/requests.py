"""Requests as the API shows them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from chairlift.observability.explain import BatchMember, ContentionCost, ExplainedSpan, Explanation
from chairlift.observability.tracked_request import Span, TrackedRequest
from chairlift.observability.wait_text import describe_span
from chairlift.observability.what_if import what_ifs
from chairlift.server.api.protocol.base import ErrorBody
from chairlift.server.telemetry.engine_observer import EngineObserver


class RequestTimings(BaseModel):
    """Seconds after arrival; null where it has not got so far. `age`: until now, or until it ended."""

    queue_time: float | None
    time_to_first_token: float | None
    time_per_output_token: float | None
    last_token: float | None
    age: float


class SequenceView(BaseModel):
    """One of the answers to a call. `wait_reason`: what it waits for now."""

    id: str
    state: str
    finish_reason: str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_blocks: int
    num_preemptions: int
    num_recomputed_tokens: int
    wait_reason: str | None
    steps_waited: dict[str, int]
    timings: RequestTimings


class RequestView(BaseModel):
    """A call and its sequences."""

    id: str
    object: Literal["request"] = "request"
    sequences: list[SequenceView]


class RequestList(BaseModel):
    object: Literal["list"] = "list"
    data: list[SequenceView]


class SpanView(BaseModel):
    """See `ExplainedSpan`."""

    reason: str
    text: str
    start: float
    end: float
    num_steps: int
    head: str | None
    is_head: bool
    needed_blocks: int | None
    free_blocks: int | None
    evictable_blocks: int | None
    largest_free_piece: int | None
    num_running: int | None
    num_waiting: int | None
    largest_holders: list[BatchMember]
    estimate: float | None


class WaitView(BaseModel):
    cause: Literal["arrival", "preemption"]
    seconds: float
    spans: list[SpanView]


class WhatIfView(BaseModel):
    changes: dict[str, int | str]
    admits: bool
    text: str


class SequenceExplanation(BaseModel):
    """See `Explanation`."""

    id: str
    state: str
    queue_time: float | None
    position: int | None
    expected_wait: float | None
    rejection: str | None
    waits: list[WaitView]
    would_admit: list[WhatIfView]
    contention: ContentionCost


class ExplanationView(BaseModel):
    id: str
    object: Literal["request.explanation"] = "request.explanation"
    sequences: list[SequenceExplanation]


def sequence_view(request: TrackedRequest, waits: Sequence[Sequence[Span]], now: float) -> SequenceView:
    """`waits`: the spans of each of its waits."""
    arrived, ended = request.arrived, request.finished
    steps_waited: Counter[str] = Counter()
    for span in chain.from_iterable(waits):
        steps_waited[span.reason] += span.num_steps
    return SequenceView(
        id=request.request_id,
        state=request.state,
        finish_reason=None if ended is None else ended.finish_reason,
        num_prompt_tokens=arrived.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_computed_tokens=request.num_computed,
        num_output_tokens=request.num_output_tokens,
        max_tokens=arrived.max_tokens,
        num_blocks=request.num_blocks if request.state == "running" else 0,
        num_preemptions=request.num_preemptions,
        num_recomputed_tokens=request.recompute_tokens,
        wait_reason=waits[-1][-1].reason if request.state == "waiting" and waits[-1] else None,
        steps_waited=dict(+steps_waited),
        timings=_timings(request, now),
    )


def _timings(request: TrackedRequest, now: float) -> RequestTimings:
    arrival = request.arrived.time
    first, last, count = request.first_token, request.last_token, request.num_output_tokens
    per_token = None if first is None or last is None or count < 2 else (last - first) / (count - 1)
    return RequestTimings(
        queue_time=request.queue_time,
        time_to_first_token=None if first is None else first - arrival,
        time_per_output_token=per_token,
        last_token=None if last is None else last - arrival,
        age=(now if request.finished is None else request.finished.time) - arrival,
    )


def explanation_view(explanation: Explanation) -> SequenceExplanation:
    content = asdict(explanation)
    for wait, shown in zip(explanation.waits, content["waits"], strict=True):
        shown["spans"] = [_span_view(span) for span in wait.spans]
    return SequenceExplanation.model_validate(content)


def _span_view(span: ExplainedSpan) -> dict[str, Any]:
    return {**asdict(span), "text": describe_span(span)}


NOT_FOUND_ERRORS: dict[int | str, dict[str, Any]] = {404: {"model": ErrorBody}}


def router(observer: EngineObserver) -> APIRouter:
    """A key sees the requests of its own tenant; an admin's sees all."""
    routes = APIRouter()

    @routes.get("/v1/requests")
    async def list_requests(request: Request) -> RequestList:
        """The unfinished ones, by arrival."""
        viewer = observer.viewer(request)
        found = (entry for entry in observer.tracker.requests() if entry.state in ("waiting", "running"))
        return RequestList(data=[_view(observer, entry) for entry in found if viewer.may_see(entry.tenant)])

    @routes.get("/v1/requests/{request_id}", responses=NOT_FOUND_ERRORS)
    async def get_request(request_id: str, request: Request) -> RequestView:
        found = _find(observer, request_id, request)
        return RequestView(id=request_id, sequences=[_view(observer, entry) for entry in found])

    @routes.get("/v1/requests/{request_id}/explain", responses={**NOT_FOUND_ERRORS, 429: {"model": ErrorBody}})
    async def explain_request(request_id: str, request: Request) -> ExplanationView:
        """Counts as one of a minute's requests of its key: what would have let a request in takes time to find."""
        request.state.admission.check_query(request.state.key)
        found = _find(observer, request_id, request)
        explainer, viewer = observer.explainer, observer.viewer(request)
        blocked = [explainer.refusal(entry) for entry in found]
        ways = await asyncio.to_thread(lambda: [[] if one is None else what_ifs(one) for one in blocked])
        now = observer.now()
        explained = (explainer.explain(entry, viewer, now, its) for entry, its in zip(found, ways, strict=True))
        return ExplanationView(id=request_id, sequences=[explanation_view(entry) for entry in explained])

    return routes


def _find(observer: EngineObserver, request_id: str, request: Request) -> list[TrackedRequest]:
    if found := observer.find(request_id, observer.viewer(request)):
        return found
    why = "it ended too long ago, never got to the engine, or is another key's"
    raise HTTPException(404, f"request {request_id!r:.140} is not known: {why}")


def _view(observer: EngineObserver, entry: TrackedRequest) -> SequenceView:
    now = observer.now()
    return sequence_view(entry, observer.tracker.spans(entry, now), now)
