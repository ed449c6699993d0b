"""The route class of endpoints with a request body. Large bodies are parsed by a preparation worker, not by FastAPI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from chairlift.errors import RequestError
from chairlift.server.http.body_limits import LARGE_BODY, check_depth
from chairlift.server.http.error_responses import NOT_JSON_MESSAGE
from chairlift.server.http.streaming import cancel_on_disconnect
from chairlift.server.preparation.preparation import Preparation

AnswerPrepared = Callable[[Any, Any, Request], Awaitable[Response]]
"""Answers a call from its body without the large fields, its plan and the HTTP request."""


class ParsePacer:
    """Limits the parsing of small bodies to one in each iteration of the event loop.

    Otherwise many bodies that arrive together are parsed in one iteration, which delays all other work.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        """Return in an iteration of the event loop in which no other caller returns."""
        async with self._lock:
            await asyncio.sleep(0)


class PreparedRoutes:
    """Creates route classes for endpoints with a request body.

    Args:
        max_json_depth: the maximum nesting depth of arrays and objects in a body.
    """

    def __init__(self, preparation: Preparation, max_json_depth: int) -> None:
        self._preparation = preparation
        self._max_json_depth = max_json_depth
        self._pacer = ParsePacer()

    def route_class(
        self, endpoints: Mapping[str, tuple[str, AnswerPrepared]], base: type[APIRoute] = APIRoute
    ) -> type[APIRoute]:
        """A route class for the endpoints of one API.

        Args:
            endpoints: path -> the name of the planner in `EndpointPlanners`, and the function that answers a call
                after a worker has prepared it.
            base: the route class to extend.
        """
        preparation, max_json_depth, pacer = self._preparation, self._max_json_depth, self._pacer

        class PreparedRoute(base):  # type: ignore[misc, valid-type]
            def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
                handle_small = super().get_route_handler()
                planner, answer = endpoints[self.path]

                async def handle(request: Request) -> Response:
                    body = await request.body()
                    slot = request.app.state.admission.reserve_slot(request.state.key)
                    request.state.slot = slot
                    try:
                        if len(body) < LARGE_BODY:
                            await pacer.wait()
                            check_depth(body, max_json_depth)
                        elif not _is_json(request):
                            raise RequestError(NOT_JSON_MESSAGE)
                        elif preparation.should_use_worker(body):
                            return await cancel_on_disconnect(request, handle_large(request))
                        else:
                            await preparation.run(request.state.key.tenant, check_depth, body, max_json_depth)
                        del body
                        response: Response = await handle_small(request)
                        return response
                    finally:
                        slot.close()

                async def handle_large(request: Request) -> Response:
                    body = await request.body()
                    request._body = b""  # The body is not read again, but the request exists until its stream ends.
                    prepared = await preparation.prepare(request.state.key.tenant, planner, body)
                    del body
                    request.state.release_body()
                    return await answer(prepared.body, prepared.plan, request)

                return handle

        return PreparedRoute


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
