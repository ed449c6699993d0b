"""The routes of the endpoints with a request body. They parse their bodies themselves, FastAPI only describes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final, TypeVar

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from chairlift.errors import RequestError
from chairlift.server.access.admission import AdmissionController
from chairlift.server.access.call import Call, call_of
from chairlift.server.api.endpoint import CallContext, Endpoint
from chairlift.server.http.body_limits import LARGE_BODY
from chairlift.server.http.error_responses import NOT_JSON_MESSAGE
from chairlift.server.http.streaming import cancel_on_disconnect
from chairlift.server.models.model_calls import ModelCalls, ModelSelection, read_selection
from chairlift.server.preparation.planners import parse_body
from chairlift.server.protocol.base import RequestBody

ERROR_STATUSES: Final = (400, 401, 404, 408, 413, 429, 503)
"""The statuses of the errors of the endpoints."""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Body = TypeVar("Body", bound=RequestBody)


class EndpointCaller:
    """Answers the calls of endpoints.

    small body --> parsed on the event loop --> model --> planned on a thread -----------------+--> served
    large body --> model --> parsed and planned in a preparation worker, or on a thread -------+
    """

    def __init__(self, calls: ModelCalls, admission: AdmissionController) -> None:
        self._calls = calls
        self._admission = admission
        self._parse_lock = asyncio.Lock()

    async def handle(self, endpoint: Endpoint[Any, Any], request: Request) -> Response:
        """Answer a call. If its client disconnects, the work for it ends."""
        body = await request.body()
        call = call_of(request)
        call.slot = self._admission.reserve_slot(call.key)
        try:
            if endpoint.id_prefix:
                self._admission.check_token_rate(call.key)
            else:
                self._admission.count_request(call.key)
            if not _is_json(request):
                raise RequestError(NOT_JSON_MESSAGE)
            respond = self._respond_to_small if len(body) < LARGE_BODY else self._respond_to_large
            del body  # The request has it, until it has been parsed.
            return await cancel_on_disconnect(request, respond(endpoint, request, call))
        finally:
            call.slot.close()

    async def _respond_to_small(self, endpoint: Endpoint[Any, Any], request: Request, call: Call) -> Response:
        # Only one small body is parsed in each iteration of the event loop. Otherwise many bodies that arrive together
        # would delay all other work.
        async with self._parse_lock:
            await asyncio.sleep(0)
        body = parse_body(endpoint.body, await request.body())
        async with self._calls.lease(endpoint.id_prefix, ModelSelection.of(body), call) as lease:
            plan = await lease.service.preparation.plan(endpoint.path, body)
            return await endpoint.serve(CallContext(endpoint, call, lease, self._admission), body, plan)

    async def _respond_to_large(self, endpoint: Endpoint[Any, Any], request: Request, call: Call) -> Response:
        selection = ModelSelection()
        if self._calls.needs_fields:
            selection = await asyncio.to_thread(read_selection, await request.body())
        async with self._calls.lease(endpoint.id_prefix, selection, call) as lease:
            raw = await request.body()
            request._body = b""  # The body is not read again, but the request exists until its stream ends.
            prepare = lease.service.preparation.prepare
            prepared = await prepare(call.key.tenant, endpoint.path, raw)
            del raw
            self._calls.check(prepared.body, lease, call)
            context = CallContext(endpoint, call, lease, self._admission)
            return await endpoint.serve(context, prepared.body, prepared.plan)


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


async def read_body(request: Request, body_type: type[Body]) -> Body:
    """Parse and validate the body of a call; raises RequestError."""
    if not _is_json(request):
        raise RequestError(NOT_JSON_MESSAGE)
    return parse_body(body_type, await request.body())


def make_router(endpoints: Iterable[Endpoint[Any, Any]], caller: EndpointCaller) -> APIRouter:
    """The routes of endpoints."""
    routes = APIRouter()
    for endpoint in endpoints:
        for path in (endpoint.path, *endpoint.aliases):
            add_body_route(
                routes,
                path,
                partial(caller.handle, endpoint),
                endpoint.body,
                endpoint.response,
                name=endpoint.name,
                description=endpoint.description,
                responses={status: {"model": endpoint.errors.body} for status in ERROR_STATUSES},
                include_in_schema=path == endpoint.path,
            )
    return routes


def add_body_route(
    routes: APIRouter, path: str, handler: Handler, body: type[BaseModel], response: type[BaseModel], **options: Any
) -> None:
    """Add a route for POST requests, whose handler parses the body. FastAPI only describes it.

    Args:
        options: further arguments of `APIRouter.add_api_route`.
    """

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Handler:
            return handler

    async def describe(body: Any) -> Any:
        raise AssertionError("the route has a handler of its own")

    describe.__annotations__ = {"body": body}
    routes.add_api_route(
        path, describe, methods=["POST"], response_model=response, route_class_override=BodyRoute, **options
    )
