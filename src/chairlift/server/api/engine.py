"""GET /v1/engine, /v1/events and /metrics: the state, the events and the metrics of the engine."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from chairlift.engine.process.client import EngineStatus
from chairlift.observability.event_log import encode_event
from chairlift.observability.step_cost import CostLine
from chairlift.server.access.admission import AdmissionController
from chairlift.server.access.call import call_of, require_admin
from chairlift.server.http.error_responses import error_models
from chairlift.server.models.model_manager import ModelManager
from chairlift.server.models.served_model import VisibleEngine
from chairlift.server.protocol.encoding import to_named_event
from chairlift.server.telemetry.engine_observer import EngineObserver


class KVCachePlanView(BaseModel):
    """The planned size of the KV pool."""

    num_blocks: int
    block_size: int
    num_slots: int
    num_bytes: int


class BlockPoolView(BaseModel):
    """The KV pool after the schedule of the last step; all blocks are free if the engine is idle.

    `slots` are the numbers of slots by kind. `evictable_blocks`, which hold cached prefixes, is null if the engine is
    idle with a prefix cache, because it is not known then.
    """

    free_blocks: int
    evictable_blocks: int | None
    held_blocks: int
    slots: dict[str, int]
    shared_slots: int


class BatchView(BaseModel):
    """The batch: the numbers of running and waiting requests, and of tokens computed in the last step.

    `wait_reason` is the reason why the head of the queue, `head`, was not admitted to this step.
    """

    step: int
    num_running: int
    num_waiting: int
    num_tokens: int
    wait_reason: str | None
    head: str | None


class EngineView(BaseModel):
    """The state of the engine."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    object: Literal["engine"] = "engine"
    status: EngineStatus
    model: str
    configuration: dict[str, Any]
    kernels: str | None = Field(description="The kernel set; native kernels with their instruction set.")
    plan: KVCachePlanView | None
    pool: BlockPoolView | None
    batch: BatchView | None
    step_cost: CostLine | None
    events_dropped: int = Field(description="Events dropped by a busy server; always 0 for an engine process.")
    replica: str | None = Field(description="The id of this replica; null if the model has one engine.")
    replicas: list[str] = Field(description="The ids of all replicas of the model.")


def router(manager: ModelManager, admission: AdmissionController) -> APIRouter:
    """The endpoints of the engines: their states and events for admin keys, and their metrics for all keys."""
    routes = APIRouter(tags=["Engine and requests"])
    registry = CollectorRegistry()
    registry.register(_AllMetrics(manager))
    ProcessCollector(registry=registry)

    @routes.get("/v1/engine", responses=error_models(403, 404))
    async def get_engine(request: Request, model: str | None = None, replica: str | None = None) -> EngineView:
        """Return the status, configuration, KV pool and batch of the engine of a model, or of one of its replicas."""
        require_admin(request, "shows the requests of all keys")
        served = manager.find(model, call_of(request).key)
        engine = served.engine(replica)
        facts, tracker = engine.facts, engine.observer.tracker
        return EngineView(
            status=engine.status(),
            model=engine.name,
            configuration={} if tracker.started is None else asdict(tracker.started),
            kernels=None if facts is None else facts.kernels,
            plan=None if facts is None else KVCachePlanView.model_validate(facts.kv_cache_plan, from_attributes=True),
            pool=_pool_view(engine.observer),
            batch=_batch_view(engine.observer),
            step_cost=tracker.cost.line(),
            events_dropped=engine.events.num_dropped,
            replica=engine.replica_id,
            replicas=list(served.replicas),
        )

    @routes.get("/v1/events", responses=error_models(403, 404, 429))
    async def stream_events(request: Request, model: str | None = None, replica: str | None = None) -> Response:
        """Stream the events of the engine of a model, or of one of its replicas, from now on, the configuration first.
        A slow reader loses the oldest events and receives their number."""
        require_admin(request, "shows the requests of all keys")
        call = call_of(request)
        return admission.open_events(call, event_stream(manager.find(model, call.key).engine(replica)))

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def get_metrics() -> Response:
        """Return the metrics of all models in the text format of Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes


class _AllMetrics(Collector):
    """Collects the metrics of all engines, with the label `replica` for replicas. Each name occurs once in the
    output, as the text format of Prometheus requires."""

    def __init__(self, manager: ModelManager) -> None:
        self._manager = manager

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for engine in (each for model in self._manager.models for each in model.engines):
            label = {} if engine.replica_id is None else {"replica": engine.replica_id}
            for metric in engine.metrics.collect():
                samples = [sample._replace(labels=sample.labels | label) for sample in metric.samples]
                known = merged.setdefault(metric.name, metric)
                known.samples = samples if known is metric else known.samples + samples
        return [*merged.values(), self._adapters()]

    def _adapters(self) -> Metric:
        """The loaded adapters, from which gateways choose a server (Gateway API Inference Extension)."""
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Time of this answer, with the LoRA adapters that are ready.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters", "model_name"],
        )
        for model in self._manager.models:
            if model.facts is not None and model.facts.max_loras:
                adapters = ",".join(model.adapters)
                family.add_metric([str(model.facts.max_loras), adapters, "", model.name], time.time())
        return family


async def event_stream(model: VisibleEngine) -> AsyncGenerator[bytes, None]:
    """Yield the events of an engine as server-sent events, with a `dropped` event after each loss."""
    index, num_dropped = model.feed.next_index, 0
    model.feed.num_readers += 1
    try:
        if (started := model.observer.tracker.started) is not None:
            yield to_named_event(started.type, encode_event(started))
        while True:
            await model.feed.wait_for_event(index)
            num_lost, entries = model.feed.entries_since(index)
            index += num_lost + len(entries)
            if num_lost:
                num_dropped += num_lost
                yield to_named_event("dropped", json.dumps({"type": "dropped", "num_dropped": num_dropped}).encode())
            for event, encoded in entries:
                yield to_named_event(event.type, encoded)
    finally:
        model.feed.num_readers -= 1


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
    has_waiting = state["waiting"] > 0
    return BatchView(
        step=last.step,
        num_running=state["running"],
        num_waiting=state["waiting"],
        num_tokens=sum(last.num_scheduled) + sum(last.num_padding),
        wait_reason=last.wait_reason if has_waiting else None,
        head=last.head_id if has_waiting else None,
    )
