"""GET /metrics: the metrics of the engine for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import Response

from chairlift.server.telemetry.engine_observer import EngineObserver


def router(observer: EngineObserver) -> APIRouter:
    """The endpoint of the metrics, which contain counts and times but no prompts or outputs."""
    routes = APIRouter()
    registry = CollectorRegistry()
    registry.register(observer.metrics)

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def get_metrics() -> Response:
        """Return the metrics in the text format of Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes
