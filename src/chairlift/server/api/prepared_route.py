"""The route class of endpoints with a request body. Large bodies are parsed by a preparation worker, not by FastAPI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from chairlift.errors import RequestError
from chairlift.server.api.serving import Endpoint
from chairlift.server.http.body_limits import LARGE_BODY, check_depth
from chairlift.server.http.error_responses import NOT_JSON_MESSAGE
from chairlift.server.http.streaming import cancel_on_disconnect
from chairlift.server.preparation.preparation import Preparation


def prepared_route_class(
    endpoints: Mapping[str, Endpoint[Any, Any]], preparation: Preparation, max_json_depth: int
) -> type[APIRoute]:
    """Create the route class of endpoints with a request body.

    Args:
        endpoints: path -> the endpoint that answers a call after a worker has prepared it.
        max_json_depth: the maximum nesting depth of arrays and objects in a body.
    """
    parse_lock = asyncio.Lock()

    class PreparedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle_small = super().get_route_handler()

            async def handle(request: Request) -> Response:
                body = await request.body()
                slot = request.app.state.admission.reserve_slot(request.state.key)
                request.state.slot = slot
                try:
                    if len(body) < LARGE_BODY:
                        # Only one small body is parsed in each iteration of the event loop. Otherwise many bodies that
                        # arrive together would delay all other work.
                        async with parse_lock:
                            await asyncio.sleep(0)
                        check_depth(body, max_json_depth)
                    elif not _is_json(request):
                        raise RequestError(NOT_JSON_MESSAGE)
                    elif preparation.should_use_worker(body):
                        return await cancel_on_disconnect(request, handle_large(request))
                    else:
                        await preparation.run(request.state.key.tenant, check_depth, body, max_json_depth)
                    del body
                    return await cancel_on_disconnect(request, handle_small(request))
                finally:
                    slot.close()

            async def handle_large(request: Request) -> Response:
                body = await request.body()
                request._body = b""  # The body is not read again, but the request exists until its stream ends.
                prepared = await preparation.prepare(request.state.key.tenant, self.path, body)
                del body
                request.state.release_body()
                return await endpoints[self.path].respond(prepared.body, request, prepared.plan)

            return handle

    return PreparedRoute


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
