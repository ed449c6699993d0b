"""Bursts of synthetic requests, which the live page sends to show how the engine schedules them."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

from chairlift.engine.async_llm import AsyncLLM, Generation
from chairlift.errors import ChairliftError, RequestError
from chairlift.sampling_params import SamplingParams
from chairlift.server.access.admission import Permit
from chairlift.server.http.streaming import EventStream
from chairlift.server.web.page_bodies import BurstBody, BurstRequest, BurstView

PING: Final = b"\n"
"""White space after the JSON of the response, which every parser ignores."""


async def start_burst(llm: AsyncLLM, permit: Permit, body: BurstBody) -> EventStream:
    """Send the requests of a burst to the engine. They count as one call of the key, and as its tokens. Raises
    RequestError if the longest one does not fit in `max_model_len`, or as `Permit.admit`.

    Returns:
        A response whose first line is a BurstView, and which ends when all requests have ended. Their outputs are
        discarded. If the client disconnects, they are aborted.
    """
    facts = llm.engine.facts
    longest, limit = body.max_prompt_tokens + body.max_output_tokens, facts.scheduler_config.max_model_len
    if longest > limit:
        given = f"max_prompt_tokens={body.max_prompt_tokens} and max_output_tokens={body.max_output_tokens}"
        message = f"{given} are {longest} tokens together, and max_model_len={limit}: reduce one of them"
        raise RequestError(message, "max_prompt_tokens")
    requests = _random_requests(body)
    permit.admit([range(request.num_prompt_tokens) for request in requests])
    generations: list[Generation] = []

    def end() -> None:
        for generation in generations:
            generation.abort()
        permit.close()

    try:
        prompts = await asyncio.to_thread(_random_prompts, requests, body.seed, facts.model_config.vocab_size)
        for request, prompt in zip(requests, prompts, strict=True):
            params = SamplingParams(
                max_tokens=request.num_output_tokens, ignore_eos=True, detokenize=False, is_streamed=False
            )
            generation = llm.start(
                None,
                prompt,
                params,
                request_id=request.id,
                tenant=permit.tenant,
                cache_salt=permit.cache_salt,
                on_output=permit.track_prompt(len(prompt)),
            )
            generations.append(generation)
    except BaseException:
        end()
        raise
    view = BurstView(requests=requests)
    return EventStream(_follow(view, generations), end, PING, media_type="application/json")


def _random_requests(body: BurstBody) -> list[BurstRequest]:
    """Requests with numbers of prompt and output tokens that are uniform between their bounds."""
    draw, burst_id = random.Random(body.seed), f"burst-{uuid.uuid4().hex[:12]}"
    return [
        BurstRequest(
            id=f"{burst_id}-{index}",
            num_prompt_tokens=draw.randint(body.min_prompt_tokens, body.max_prompt_tokens),
            num_output_tokens=draw.randint(body.min_output_tokens, body.max_output_tokens),
        )
        for index in range(body.num_requests)
    ]


def _random_prompts(requests: list[BurstRequest], seed: int, vocab_size: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(vocab_size), k=request.num_prompt_tokens) for request in requests]


async def _follow(view: BurstView, generations: list[Generation]) -> AsyncIterator[bytes]:
    """Yield the view, and end with the last request."""
    yield view.model_dump_json().encode() + PING
    for generation in generations:
        with suppress(ChairliftError):  # The event log and the page show it.
            await generation.collect()
