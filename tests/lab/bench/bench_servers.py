"""A server for the load generator that misbehaves to order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Answer = Callable[[int, dict[str, Any]], Awaitable[Response]]


@dataclass(slots=True)
class FakeServer:
    """Bodies of the calls so far; `answer(index, body)` makes the response to call number `index`."""

    answer: Answer
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    url: str = ""

    async def _generate(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.authorizations.append(request.headers.get("authorization"))
        return await self.answer(len(self.bodies) - 1, self.bodies[-1])

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeServer]:
        paths = ("/v1/completions", "/v1/chat/completions")
        routes = [Route(path, self._generate, methods=["POST"]) for path in paths]
        app = Starlette(routes=[*routes, Route("/v1/models", self._models)])
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield self
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


def event(body: object) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()) + b"\n\n"


def text_chunk(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def usage_chunk(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}


def stream(*events: bytes, gap: float = 0.0, cut: bool = False) -> StreamingResponse:
    """The events, `gap` seconds before each; with `cut` the connection breaks after them."""

    async def body() -> AsyncIterator[bytes]:
        for item in events:
            await asyncio.sleep(gap)
            yield item
        if cut:
            await asyncio.sleep(0.01)
            raise ConnectionResetError

    return StreamingResponse(body(), media_type="text/event-stream")


def whole_answer(body: dict[str, Any], gap: float = 0.0, with_usage: bool = True) -> StreamingResponse:
    """As many words as were asked for."""
    count = body.get("max_tokens") or body["max_completion_tokens"]
    chunks = [text_chunk("word ", "length" if index == count - 1 else None) for index in range(count)]
    usage = [usage_chunk(len(body.get("prompt", [])), count)] if with_usage else []
    return stream(*(event(chunk) for chunk in [*chunks, *usage]), event(b"[DONE]"), gap=gap)
