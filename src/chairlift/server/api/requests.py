"""GET /v1/requests: the state of requests, and explanations of their waits."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Final, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from chairlift.engine.explanation.explain import Explanation
from chairlift.engine.explanation.what_if import what_ifs
from chairlift.server.access.admission import AdmissionController
from chairlift.server.access.call import call_of
from chairlift.server.access.keys import Key
from chairlift.server.http.error_responses import error_models
from chairlift.server.http.streaming import cancel_on_disconnect
from chairlift.server.models.model_manager import ModelManager, ModelWait
from chairlift.server.telemetry.engine_observer import ObservedRequest

MAX_EXPLAINED: Final = 16  # sequences of a request, because each is compared with all known requests
VIEWS_PER_TURN: Final = 32  # sequences of a list that are described before other calls have their turn
_what_if_thread: Final = ThreadPoolExecutor(1, "chairlift-what-if")  # Several would delay the event loop more.


class RequestTimings(BaseModel):
    """Times in seconds after arrival, null if not reached. `age` is the time until now, or until the end."""

    queue_time: float | None
    time_to_first_token: float | None
    time_per_output_token: float | None
    last_token: float | None
    age: float


class SequenceView(BaseModel):
    """The state of one answer to a request. `wait_reason` is null if it is not waiting.

    `replica` is the id of the replica that computes it; it is null if the model has no replicas. Draft tokens are those
    of speculative decoding that were verified.
    """

    id: str
    replica: str | None
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
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    wait_reason: str | None
    steps_waited: dict[str, int]
    timings: RequestTimings


class RequestView(BaseModel):
    """The state of a request: one sequence for each prompt and each of `n` answers."""

    id: str
    object: Literal["request"] = "request"
    sequences: list[SequenceView]


class ModelWaitView(BaseModel):
    """The wait of a call until its model was loaded. It ends before its sequences arrive at the engine."""

    id: str
    model: str
    model_state: str
    seconds: float
    is_waiting: bool
    text: str


class RequestList(BaseModel):
    """The sequences of all unfinished requests, and the calls that wait for a model to be loaded."""

    object: Literal["list"] = "list"
    data: list[SequenceView]
    waiting_for_model: list[ModelWaitView]


class ExplanationView(BaseModel):
    """The explanations of the first sequences of a request, and of its wait for the model, if it was not loaded."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    id: str
    object: Literal["request.explanation"] = "request.explanation"
    num_sequences: int = Field(description=f"All sequences; at most {MAX_EXPLAINED} are explained.")
    sequences: list[Explanation]
    model_wait: ModelWaitView | None = None


def router(manager: ModelManager, admission: AdmissionController) -> APIRouter:
    """Create the endpoints below /v1/requests. A key can read the requests of its tenant; an admin key can read all."""
    routes = APIRouter(tags=["Engine and requests"])
    list_turn = asyncio.Lock()

    @routes.get("/v1/requests", response_model=RequestList)
    async def list_requests(request: Request) -> Response:
        """List the unfinished requests by arrival."""
        viewer = manager.default.observer.viewer(call_of(request).key)
        found = [
            ObservedRequest(entry, engine.observer)
            for model in manager.models
            for engine in model.engines
            for entry in engine.observer.tracker.requests()
            if entry.state in ("waiting", "running") and viewer.can_see(entry.tenant)
        ]
        found.sort(key=lambda each: each.request.arrived.time)
        waits = [
            _wait_view(wait) for wait in manager.waits.values() if wait.ended is None and viewer.can_see(wait.tenant)
        ]
        data = await cancel_on_disconnect(request.receive, _views(found, list_turn))
        listed = RequestList.model_construct(data=data, waiting_for_model=waits)
        return Response(listed.model_dump_json(), media_type="application/json")  # It is not validated again.

    @routes.get("/v1/requests/{request_id}", responses=error_models(404))
    async def get_request(request_id: str, request: Request) -> RequestView:
        """Return the state of a request, by the `id` of its response."""
        return RequestView(id=request_id, sequences=list(map(_view, _find(manager, request_id, request))))

    @routes.get("/v1/requests/{request_id}/explain", responses=error_models(404, 429))
    async def explain_request(request_id: str, request: Request) -> ExplanationView:
        """Explain why a request waited. This counts towards the requests per minute of the key."""
        if not (key := call_of(request).key).is_admin:
            admission.count_request(key)
        wait = manager.waits.get(request_id)
        view = ExplanationView(id=request_id, num_sequences=0, sequences=[])
        if wait is not None and manager.default.observer.viewer(key).can_see(wait.tenant):
            view.model_wait = _wait_view(wait)
            if wait.ended is None or wait.error is not None:
                return view
        found = _find(manager, request_id, request)
        view.num_sequences = len(found)
        view.sequences = await cancel_on_disconnect(request.receive, _explain(found[:MAX_EXPLAINED], key))
        return view

    return routes


async def _explain(found: list[ObservedRequest], key: Key) -> list[Explanation]:
    """Explain sequences, on a thread where it may take long. The steps are in this order so that the order of the queue
    is computed once for all sequences, and other calls have their turn between two of them."""
    loop, blocked = asyncio.get_running_loop(), []
    for each in found:
        blocked.append(each.observer.explainer.blocked_request(each.request))
        await asyncio.sleep(0)
    changes = [[] if each is None else await loop.run_in_executor(_what_if_thread, what_ifs, each) for each in blocked]
    explained = []
    for each, would_admit in zip(found, changes, strict=True):
        observer = each.observer
        explanation = observer.explainer.explain(each.request, observer.viewer(key), observer.now(), would_admit)
        explained.append(replace(explanation, replica=observer.replica_id))
        await asyncio.sleep(0)
    return explained


def _find(manager: ModelManager, request_id: str, request: Request) -> list[ObservedRequest]:
    """The sequences of an API call that the key can see, over all replicas; raises HTTPException if there are none. One
    that was sent again is returned only for its last replica."""
    viewer = manager.default.observer.viewer(call_of(request).key)
    known = (each for each in manager.find_sequences(request_id) if not each.is_resent)
    if found := [each for each in known if viewer.can_see(each.request.tenant)]:
        return found
    reason = "it ended too long ago, did not reach the engine, or belongs to another key"
    raise HTTPException(404, f"request {request_id!r:.140} is not known: {reason}")


def _wait_view(wait: ModelWait) -> ModelWaitView:
    return ModelWaitView(
        id=wait.call_id,
        model=wait.model.name,
        model_state=wait.model.state,
        seconds=wait.seconds,
        is_waiting=wait.ended is None,
        text=wait.describe(),
    )


async def _views(found: list[ObservedRequest], turn: asyncio.Lock) -> list[SequenceView]:
    """Describe sequences, where other calls have their turn in between. Lists take turns, because otherwise a part of
    each of them would be between two turns of another call."""
    views = []
    async with turn:
        for index, each in enumerate(found, 1):
            views.append(_view(each))
            if index % VIEWS_PER_TURN == 0:
                await asyncio.sleep(0)
    return views


def _view(observed: ObservedRequest) -> SequenceView:
    observer, request = observed.observer, observed.request
    now, arrival = observer.now(), request.arrived.time
    first, last, count = request.first_token, request.last_token, request.num_output_tokens
    waits = observer.tracker.spans(request, now)
    steps_waited: Counter[str] = Counter()
    for span in chain.from_iterable(waits):
        steps_waited[span.reason] += span.num_steps
    return SequenceView(
        id=request.request_id,
        replica=observer.replica_id,
        state=request.state,
        finish_reason=None if request.finished is None else request.finished.finish_reason,
        num_prompt_tokens=request.arrived.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_computed_tokens=request.num_computed,
        num_output_tokens=request.num_output_tokens,
        max_tokens=request.arrived.max_tokens,
        num_blocks=request.num_blocks if request.state == "running" else 0,
        num_preemptions=request.num_preemptions,
        num_recomputed_tokens=request.recompute_tokens,
        num_draft_tokens=request.draft_tokens,
        num_accepted_draft_tokens=request.accepted_draft_tokens,
        wait_reason=waits[-1][-1].reason if request.state == "waiting" and waits[-1] else None,
        steps_waited=dict(+steps_waited),
        timings=RequestTimings(
            queue_time=request.queue_time,
            time_to_first_token=request.time_to_first_token,
            time_per_output_token=None if first is None or last is None or count < 2 else (last - first) / (count - 1),
            last_token=None if last is None else last - arrival,
            age=(now if request.end_time is None else request.end_time) - arrival,
        ),
    )
