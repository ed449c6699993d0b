"""POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from chairlift.server.endpoints import Endpoints
from chairlift.server.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    ErrorBody,
    TokenizeRequest,
    TokenizeResponse,
)


def router(endpoints: Endpoints) -> APIRouter:
    """The routes over the tokenizer and chat template of an engine."""
    finish = endpoints.finish_utility
    routes = APIRouter(
        responses={status: {"model": ErrorBody} for status in (400, 404, 429, 503)},
        route_class=endpoints.route_class({"/tokenize": ("tokenize", finish), "/detokenize": ("detokenize", finish)}),
    )

    @routes.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        return await endpoints.run_utility(endpoints.planners.tokenize, body, request)

    @routes.post("/detokenize", response_model=DetokenizeResponse)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        return await endpoints.run_utility(endpoints.planners.detokenize, body, request)

    return routes
