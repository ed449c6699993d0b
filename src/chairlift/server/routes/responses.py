"""POST /v1/responses."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.server.endpoints import Endpoints
from chairlift.server.protocol import ErrorBody, ResponseObject, ResponsesRequest


def router(endpoints: Endpoints) -> APIRouter:
    """The route of responses."""
    serving = endpoints.responses
    routes = APIRouter(
        responses={status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 429, 503)},
        route_class=endpoints.route_class({"/v1/responses": ("responses", serving.answer)}),
    )

    @routes.post("/v1/responses", response_model=ResponseObject)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        return await serving.handle(body, request)

    return routes
