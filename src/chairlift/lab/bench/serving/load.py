"""Sends a load over HTTP, each request when it is due: an open load does not wait for the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from chairlift.lab.bench.prompts import Prompts
from chairlift.lab.bench.serving.http_client import ApiClient, Call
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.request_feed import RequestFeed


async def send_load(
    api: ApiClient,
    feed: RequestFeed,
    prompts: Prompts,
    body: Callable[[WorkloadRequest], dict[str, Any]],
    on_end: Callable[[], None] = lambda: None,
) -> list[Call]:
    """Hand out the feed to its end; returns the calls in the order in which they were due.

    Args:
        api: its clock starts at the load's start.
        body: of the call for a request, without its prompt.
        on_end: called whenever a call has ended.
    """
    calls: list[Call] = []
    ended = asyncio.Event()

    async def send(request: WorkloadRequest, call: Call) -> None:
        await api.stream(body(request) | prompts.fields(request), call)
        prompts.answered(request.request_id, call.text)
        feed.finish(request.request_id, _stand_ins(request, call), api.now())
        ended.set()
        on_end()

    async with asyncio.TaskGroup() as group:
        while not feed.is_exhausted:
            for request in feed.pop_due(api.now()):
                call = Call(request.request_id, len(request.prompt_token_ids), request.output_len, due=request.arrival)
                calls.append(call)
                group.create_task(send(request, call))
            await _until(ended, feed.next_time(), api)
    return calls


def _stand_ins(request: WorkloadRequest, call: Call) -> list[int]:
    """The API does not tell the answer's token ids: as many others stand in for them."""
    return [request.prompt_token_ids[0]] * call.num_output_tokens


async def _until(event: asyncio.Event, time: float | None, api: ApiClient) -> None:
    """Wait for the event or for that time of the client's clock, whichever comes first."""
    with suppress(TimeoutError):
        async with asyncio.timeout(None if time is None else max(0.0, time - api.now())):
            await event.wait()
    event.clear()
