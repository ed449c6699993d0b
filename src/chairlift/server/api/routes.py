"""The endpoints with a request body, and their routes. They parse their bodies themselves, FastAPI only describes them.

A new endpoint is a function with the decorator `endpoint` and one line here.
"""

from __future__ import annotations

import asyncio
import gc
from codecs import BOM_UTF8
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final, TypeVar

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.responses import Response

from chairlift.engine.memory_trimming import MMAP_BYTES, release_free_heaps
from chairlift.errors import RequestError
from chairlift.server.access.admission import AdmissionController, Permit
from chairlift.server.access.call import Call, call_of
from chairlift.server.api import chat, completions, messages, pooling, responses, tokenization
from chairlift.server.api.endpoint import Endpoint
from chairlift.server.api.rendering import RENDERINGS
from chairlift.server.api.response_store import ResponseStore
from chairlift.server.http.error_responses import error_models
from chairlift.server.http.streaming import cancel_on_disconnect, run_to_end
from chairlift.server.models.model_manager import ModelManager
from chairlift.server.protocol.base import RequestBody
from chairlift.server.protocol.validation_errors import validation_problem
from chairlift.system.tenant_threads import TenantThreads

ENDPOINTS: Final[list[Endpoint[Any]]] = [
    completions.create_completion,
    chat.create_chat_completion,
    responses.create_response,
    messages.create_message,
    messages.count_tokens,
    pooling.create_embeddings,
    pooling.create_scores,
    pooling.rerank_documents,
    tokenization.tokenize_text,
    tokenization.detokenize_ids,
    *RENDERINGS,
]

LARGE_BODY: Final = 32 << 10  # bytes, from which a body is parsed on a thread
SHORT_BODY: Final = 2 << 10  # bytes, up to which it is planned on the event loop, where this costs less than a thread

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Body = TypeVar("Body", bound=RequestBody)
Result = TypeVar("Result")


class EndpointCaller:
    """Answers the calls of endpoints: body --> parsed --> model --> planned on a thread --> served."""

    def __init__(self, manager: ModelManager, admission: AdmissionController) -> None:
        self._manager = manager
        self._admission = admission
        self._responses = ResponseStore(admission.limits.response_store_bytes)
        self._small_turn = asyncio.Lock()
        self._small_turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # of each tenant
        self._large_thread = TenantThreads(1, "large-bodies")

    async def handle(self, endpoint: Endpoint[Any], request: Request) -> Response:
        """Answer a call. If its client disconnects, the work for it ends."""
        await request.body()
        call = call_of(request)
        with self._admission.open_call(call.key) as permit:
            if endpoint.id_prefix:
                self._admission.meter(call.key).check("tokens", 0.0)  # Before its prompts are tokenized.
            else:
                self._admission.count_request(call.key)
            check_media_type(request)
            return await cancel_on_disconnect(request.receive, self._respond(endpoint, request, call, permit))

    async def _respond(self, endpoint: Endpoint[Any], request: Request, call: Call, permit: Permit) -> Response:
        num_bytes = len(await request.body())
        body = await self._parse(endpoint.body, request, call)
        num_bytes += body.read_stored(partial(self._responses.of, call.key.tenant))
        with await self._manager.lease(endpoint.id_prefix, body, call) as lease, body.errors_with_own_names():
            if num_bytes <= SHORT_BODY:
                plan = endpoint.plan(lease.service.planner, body)
            else:
                run = partial(self._run_large, is_next=True) if num_bytes >= LARGE_BODY else lease.service.run
                plan = await run(call.key.tenant, endpoint.plan, lease.service.planner, body)
            body.drop_content()
            if endpoint.call is None:
                return Response(plan, media_type="application/json")
            return await endpoint.call(call, permit, lease, body, plan).serve()

    async def _parse(self, body_type: type[Body], request: Request, call: Call) -> Body:
        """Parse the body of a call, alternating between tenants: one large body at a time on a thread, and one small
        body in each iteration of the event loop. Otherwise many bodies that arrive together would delay other work."""
        if len(await request.body()) >= LARGE_BODY:
            body: Body = await self._run_large(call.key.tenant, parse_large_json, body_type, await request.body())
        else:
            async with self._small_turns[call.key.tenant], self._small_turn:
                await asyncio.sleep(0)
            body = parse_json(body_type, await request.body())
        request._body = b""  # The body is not read again, but the request exists until its stream ends.
        return body

    async def _run_large(
        self, tenant: str, function: Callable[..., Result], *arguments: object, is_next: bool = False
    ) -> Result:
        """Call a function of a large body on the thread, in the next turn of its tenant or after its earlier bodies."""

        def run() -> Result:
            self._manager.check_running()
            return function(*arguments)

        return await run_to_end(self._large_thread.submit(tenant, run, is_next=is_next))


def check_media_type(request: Request) -> None:
    """Raise RequestError if the body of a call is not declared as JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RequestError("the request body has no JSON content type: send `Content-Type: application/json`")


async def read_body(request: Request, body_type: type[Body]) -> Body:
    """Read, parse and validate the body of a call; raises RequestError."""
    check_media_type(request)
    return parse_json(body_type, await request.body())


def parse_json(body_type: type[Body], raw: bytes) -> Body:
    """Parse and validate the body of a call; raises RequestError."""
    try:
        # Unlike the standard library's parser it rejects unpaired surrogates and more than 200 levels. By default it
        # keeps short values for later calls, and each of them keeps the block of memory around it.
        given = from_json(raw.removeprefix(BOM_UTF8), cache_strings="keys")
    except ValueError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None
    try:
        return body_type.model_validate(given)
    except ValidationError as error:
        message, field = validation_problem(body_type, error.errors(), given)
    del given  # The traceback would keep it in memory.
    raise RequestError(message, field)


def parse_large_json(body_type: type[Body], raw: bytes) -> Body:
    """Parse and validate a large body as `parse_json`, and release the pieces in which it has arrived.

    Meanwhile nothing is collected as garbage. The collector would visit all values again and again, and hold the
    interpreter three times as long.
    """
    gc.disable()
    try:
        return parse_json(body_type, raw)
    finally:
        gc.enable()
        if len(raw) >= MMAP_BYTES:
            release_free_heaps()


def make_router(endpoints: Iterable[Endpoint[Any]], caller: EndpointCaller) -> APIRouter:
    routes = APIRouter(tags=["Generation and embeddings"])
    for endpoint in endpoints:
        for path in (endpoint.path, *endpoint.aliases):
            add_body_route(
                routes,
                path,
                partial(caller.handle, endpoint),
                endpoint.body,
                endpoint.response,
                name=endpoint.plan.__name__,
                description=endpoint.plan.__doc__,
                responses=error_models(400, 401, 404, 408, 413, 429, 503, path=path),
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
        raise AssertionError("the route has its own handler")

    describe.__annotations__ = {"body": body}
    routes.add_api_route(
        path, describe, methods=["POST"], response_model=response, route_class_override=BodyRoute, **options
    )
