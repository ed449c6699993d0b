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
    """Send the requests of a burst to the engine. They count as one call of the key, and as its tokens.

    Returns:
        A response whose first line is a BurstView, and which ends when all requests have ended. Their outputs are
        discarded. If the client disconnects, they are aborted.

    Raises:
        RequestError: the longest request does not fit in `max_model_len`, or a limit of the queue is exceeded.
        OverloadedError: as `Permit.admit`.
    """
    facts = llm.engine.facts
    longest, limit = body.max_prompt_tokens + body.max_output_tokens, facts.scheduler_config.max_model_len
    if longest > limit:
        raise RequestError(
            f"max_prompt_tokens={body.max_prompt_tokens} and max_output_tokens={body.max_output_tokens} are "
            f"{longest} tokens together, and max_model_len={limit}: reduce one of them",
            "max_prompt_tokens",
        )
    lengths = _draw_lengths(body)
    permit.admit([range(length) for length, _ in lengths])
    burst_id = f"burst-{uuid.uuid4().hex[:12]}"
    requests: list[BurstRequest] = []
    generations: list[Generation] = []

    def end() -> None:
        for generation in generations:
            generation.abort()
        permit.close()

    try:
        prompts = await asyncio.to_thread(_make_prompts, lengths, body.seed, facts.model_config.vocab_size)
        for index, (prompt, (_, num_output_tokens)) in enumerate(zip(prompts, lengths, strict=True)):
            request = BurstRequest(
                id=f"{burst_id}-{index}", num_prompt_tokens=len(prompt), num_output_tokens=num_output_tokens
            )
            generations.append(_start(llm, request, prompt, permit))
            requests.append(request)
    except BaseException:
        end()
        raise
    view = BurstView(requests=requests)
    return EventStream(_follow(view, generations), end, PING, media_type="application/json")


def _start(llm: AsyncLLM, request: BurstRequest, prompt: list[int], permit: Permit) -> Generation:
    return llm.start(
        None,
        prompt,
        SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True, detokenize=False, is_streamed=False),
        request_id=request.id,
        tenant=permit.tenant,
        cache_salt=permit.cache_salt,
        on_output=permit.track_prompt(len(prompt)),
    )


def _draw_lengths(body: BurstBody) -> list[tuple[int, int]]:
    """The numbers of prompt and output tokens of each request, uniform between their bounds."""
    draw = random.Random(body.seed)
    return [
        (
            draw.randint(body.min_prompt_tokens, body.max_prompt_tokens),
            draw.randint(body.min_output_tokens, body.max_output_tokens),
        )
        for _ in range(body.num_requests)
    ]


def _make_prompts(lengths: list[tuple[int, int]], seed: int, vocab_size: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(vocab_size), k=num_prompt_tokens) for num_prompt_tokens, _ in lengths]


async def _follow(view: BurstView, generations: list[Generation]) -> AsyncIterator[bytes]:
    """Yield the view, and end with the last request."""
    yield view.model_dump_json().encode() + PING
    for generation in generations:
        with suppress(ChairliftError):  # The event log and the page show it.
            await generation.collect()
