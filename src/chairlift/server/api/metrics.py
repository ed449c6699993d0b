"""GET /metrics: for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import Response

from chairlift.server.telemetry.engine_observer import EngineObserver


def router(observer: EngineObserver) -> APIRouter:
    """Counts and times; nothing of what is asked or answered."""
    routes = APIRouter()
    registry = CollectorRegistry()
    registry.register(observer.metrics)

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def get_metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes
