"""The route of endpoints that take a body: large bodies go to a preparation worker instead of FastAPI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from chairlift.server.body_limits import LARGE_BODY, check_depth
from chairlift.server.preparation.preparation import Preparation
from chairlift.server.responses import unless_disconnected

FinishCall = Callable[[Any, Any, Request], Awaitable[Response]]
"""Answers a call, given its body without its large fields, its plan and the HTTP request."""


def prepared_route(
    preparation: Preparation,
    finish: Mapping[str, tuple[str, FinishCall]],
    max_json_depth: int,
    base: type[APIRoute] = APIRoute,
) -> type[APIRoute]:
    """A route class for endpoints with a body.

    Args:
        finish: path -> the endpoint's attribute of `Planners`, and what answers a call that a worker has prepared.
        max_json_depth: nesting of arrays and objects in a body, at most.
        base: the route class that is extended.
    """

    class PreparedRoute(base):  # type: ignore[misc, valid-type]
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle_small = super().get_route_handler()
            endpoint, finish_call = finish[self.path]

            async def handle(request: Request) -> Response:
                body = await request.body()
                if preparation.takes(body) and _is_json(request):
                    return await unless_disconnected(request, handle_large(request))
                if len(body) < LARGE_BODY:
                    check_depth(body, max_json_depth)
                else:
                    await preparation.run(request.state.key.tenant, check_depth, body, max_json_depth)
                del body
                response: Response = await handle_small(request)
                return response

            async def handle_large(request: Request) -> Response:
                request.state.admission.check_call(request.state.key)
                body = await request.body()
                request._body = b""  # it is not read again, and the request lives as long as its stream
                prepared = await preparation.prepare(request.state.key.tenant, endpoint, body)
                del body
                request.state.release_body()
                return await finish_call(prepared.body, prepared.plan, request)

            return handle

    return PreparedRoute


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
