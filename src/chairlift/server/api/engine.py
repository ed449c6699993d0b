"""GET /v1/engine and /v1/events: for admins' keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, Final, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from chairlift.engine.event_hub import Subscription
from chairlift.events import to_json
from chairlift.server.api.protocol.base import ErrorBody
from chairlift.server.http.streaming import EventStream
from chairlift.server.telemetry.engine_observer import EngineObserver

MAX_BUFFERED_EVENTS: Final = 4096
"""Events that a reader may be behind before the oldest are dropped."""
MAX_READERS: Final = 16
HEARTBEAT_SECONDS: Final = 15.0

ADMIN_ERRORS: dict[int | str, dict[str, Any]] = {403: {"model": ErrorBody}}


class EngineStatusView(BaseModel):
    """See `EngineStatus`."""

    state: str
    restarts: int
    seconds_since_step: float
    num_unfinished: int
    seconds_stalled: float
    last_failure: str | None


class KVCachePlanView(BaseModel):
    """The KV pool as it was planned."""

    num_blocks: int
    block_size: int
    num_slots: int
    num_bytes: int


class BlockPoolView(BaseModel):
    """After the last step's schedule; all of it free once the engine is idle, when nobody knows how much of that is
    evictable (cached). `slots`: by kind, see Accounting; they add up to the pool."""

    free_blocks: int
    evictable_blocks: int | None
    held_blocks: int
    slots: dict[str, int]
    shared_slots: int


class BatchView(BaseModel):
    """Who runs and who waits now; `num_tokens` were computed in the last step, which was number `step`. `wait_reason`:
    why `head`, at the head of the queue, was not admitted to it, if anybody waits."""

    step: int
    num_running: int
    num_waiting: int
    num_tokens: int
    wait_reason: str | None
    head: str | None


class StepCostView(BaseModel):
    """Seconds of a step, learned from the last ones: base + per_token * tokens."""

    base: float
    per_token: float


class EngineView(BaseModel):
    object: Literal["engine"] = "engine"
    status: EngineStatusView
    configuration: dict[str, Any]
    plan: KVCachePlanView
    pool: BlockPoolView | None
    batch: BatchView | None
    step_cost: StepCostView | None
    events_dropped: int
    cpu_seconds: dict[str, float] = Field(description="CPU time outside of the engine, by the name of the API key.")


def router(observer: EngineObserver) -> APIRouter:
    routes = APIRouter()
    readers: set[Subscription] = set()

    @routes.get("/v1/engine", responses=ADMIN_ERRORS)
    async def get_engine(request: Request) -> EngineView:
        """Configuration, plan, pool and accounting."""
        _require_admin(observer, request)
        return _engine_view(observer, request.state.admission.cpu_seconds())

    @routes.get("/v1/events", responses={**ADMIN_ERRORS, 503: {"model": ErrorBody}})
    async def stream_events(request: Request) -> Response:
        """Server-sent events: all that the engine tells from now on, its configuration first. A reader that is too slow
        loses the oldest, and is told how many."""
        _require_admin(observer, request)
        if len(readers) >= MAX_READERS:
            raise HTTPException(503, f"{MAX_READERS} readers of /v1/events are connected already")
        subscription = observer.llm.events.subscribe(MAX_BUFFERED_EVENTS)
        readers.add(subscription)

        def close() -> None:
            readers.discard(subscription)
            subscription.close()

        return EventStream(event_stream(observer, subscription), on_close=close)

    return routes


def _require_admin(observer: EngineObserver, request: Request) -> None:
    if not observer.viewer(request).is_admin:
        raise HTTPException(403, f"{request.url.path} shows everybody's requests and needs an admin's key")


async def event_stream(observer: EngineObserver, subscription: Subscription) -> AsyncIterator[bytes]:
    """As server-sent events; what was lost is told before what follows it."""
    if (started := observer.tracker.started) is not None:
        yield _sse(started.type, to_json(started))
    num_dropped = 0
    while True:
        try:
            event = await asyncio.wait_for(anext(subscription), HEARTBEAT_SECONDS)
        except TimeoutError:
            yield b": nothing happens\n\n"
            continue
        except StopAsyncIteration:
            return
        if subscription.num_dropped > num_dropped:
            num_dropped = subscription.num_dropped
            yield _sse("dropped", json.dumps({"type": "dropped", "num_dropped": num_dropped}))
        yield _sse(event.type, to_json(event))


def _sse(kind: str, data: str) -> bytes:
    return f"event: {kind}\ndata: {data}\n\n".encode()


def _engine_view(observer: EngineObserver, cpu_seconds: dict[str, float]) -> EngineView:
    llm, tracker = observer.llm, observer.tracker
    plan, started = llm.engine.kv_cache_plan, tracker.started
    line = tracker.cost.line()
    return EngineView(
        status=EngineStatusView(**asdict(llm.status())),
        configuration={} if started is None else asdict(started),
        plan=KVCachePlanView(
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            num_slots=plan.num_slots,
            num_bytes=plan.num_bytes,
        ),
        pool=_pool_view(observer),
        batch=_batch_view(observer),
        step_cost=None if line is None else StepCostView(base=line[0], per_token=line[1]),
        events_dropped=llm.events.num_dropped,
        cpu_seconds=cpu_seconds,
    )


def _pool_view(observer: EngineObserver) -> BlockPoolView | None:
    tracker, last = observer.tracker, observer.tracker.last_step
    if last is None or tracker.started is None:
        return None
    is_idle, held = not tracker.counts()["running"], tracker.num_held_blocks()
    evictable = None if is_idle and tracker.started.enable_prefix_caching else last.evictable_blocks
    return BlockPoolView(
        free_blocks=tracker.started.num_blocks - held,
        evictable_blocks=evictable,
        held_blocks=held,
        slots=tracker.slots(),
        shared_slots=0 if is_idle else last.shared,
    )


def _batch_view(observer: EngineObserver) -> BatchView | None:
    last, state = observer.tracker.last_step, observer.tracker.counts()
    if last is None:
        return None
    waits = state["waiting"] > 0
    return BatchView(
        step=last.step,
        num_running=state["running"],
        num_waiting=state["waiting"],
        num_tokens=sum(last.num_scheduled) + sum(last.num_padding),
        wait_reason=last.wait_reason if waits else None,
        head=last.head_id if waits else None,
    )
