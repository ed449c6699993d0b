"""Bursts of synthetic requests, which the live page sends to show how the engine schedules them."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from chairlift.engine.async_llm import AsyncLLM, Generation
from chairlift.errors import ChairliftError, RequestError
from chairlift.events import EngineStarted
from chairlift.sampling_params import SamplingParams
from chairlift.server.access.admission import Permit
from chairlift.server.http.streaming import EventStream
from chairlift.server.web.page_bodies import MAX_BURST_REQUESTS, BurstBody, BurstRequest, BurstView

OUTPUTS_DECLARED: Final = 4
"""`max_tokens` of a burst is so many times its longest output, if that fits, as clients that do not know the length."""

MAX_FILLED: Final = 1 << 16
"""Tokens of a batch of a burst at most: a larger pool would take many minutes to fill."""

PING: Final = b"\n"
"""White space after the JSON of the response, which every parser ignores."""


@dataclass(frozen=True, slots=True)
class BurstSizes:
    """The number of requests, the smallest and the largest number of prompt and of output tokens, and `max_tokens`."""

    num_requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    max_tokens: int

    @staticmethod
    def of(body: BurstBody, engine: EngineStarted) -> BurstSizes:
        """The sizes of the body. Absent ones fill the batch, the KV memory and the queue: twice as many requests as
        seats, and prompts of about the slots of the pool for each seat, at most half of max_model_len, and MAX_FILLED
        in a batch."""
        seats = engine.static_batch_size or engine.max_num_seqs
        num_slots = engine.num_blocks_of_all_layers(engine.num_blocks) * engine.block_size
        share = max(8, min(min(num_slots, MAX_FILLED) // seats, engine.max_model_len // 2))
        prompt = _bounds(body.min_prompt_tokens, body.max_prompt_tokens, 3 * share // 4, 5 * share // 4)
        longest = min(3 * share // 8, body.max_tokens or share)
        output = _bounds(body.min_output_tokens, body.max_output_tokens, min(share // 8, longest), longest)
        generous = max(output[1], min(OUTPUTS_DECLARED * output[1], engine.max_model_len - prompt[1]))
        num_requests = body.num_requests or min(2 * seats, MAX_BURST_REQUESTS)
        return BurstSizes(num_requests, prompt, output, body.max_tokens or generous)


def _bounds(low: int | None, high: int | None, default_low: int, default_high: int) -> tuple[int, int]:
    """Both bounds, of which an absent one is its default or the given one."""
    if low is None:
        low = default_low if high is None else min(default_low, high)
    return low, max(default_high, low) if high is None else high


async def start_burst(llm: AsyncLLM, permit: Permit, body: BurstBody) -> EventStream:
    """Send the requests of a burst to the engine. They count as one call of the key, and as its tokens. Raises
    RequestError if the longest one does not fit in `max_model_len`, or as `Permit.admit`.

    Returns:
        A response whose first line is a BurstView, and which ends when all requests have ended. Their outputs are
        discarded. If the client disconnects, they are aborted.
    """
    facts = llm.engine.facts
    sizes, limit = BurstSizes.of(body, facts.started), facts.scheduler_config.max_model_len
    longest = sizes.prompt[1] + sizes.max_tokens
    if longest > limit:
        given = f"max_prompt_tokens={sizes.prompt[1]} and max_tokens={sizes.max_tokens}"
        message = f"{given} are {longest} tokens together, and max_model_len={limit}: reduce one of them"
        raise RequestError(message, "max_prompt_tokens")
    requests = _random_requests(sizes, body.seed)
    permit.admit([range(request.num_prompt_tokens) for request in requests])
    generations: list[Generation] = []

    def end() -> None:
        for generation in generations:
            generation.abort()
        permit.close()

    try:
        prompts = await asyncio.to_thread(_random_prompts, requests, body.seed, facts.model_config.vocab_size)
        for request, prompt in zip(requests, prompts, strict=True):
            params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True, detokenize=False, is_streamed=False)
            generation = llm.start(
                None,
                prompt,
                params,
                request_id=request.id,
                tenant=permit.tenant,
                cache_salt=permit.cache_salt,
                on_output=permit.track_prompt(len(prompt)),
                output_len=request.num_output_tokens,
            )
            generations.append(generation)
    except BaseException:
        end()
        raise
    view = BurstView(requests=requests)
    return EventStream(_follow(view, generations), end, PING, media_type="application/json")


def _random_requests(sizes: BurstSizes, seed: int) -> list[BurstRequest]:
    """Requests with numbers of prompt and output tokens that are uniform between their bounds."""
    draw, burst_id = random.Random(seed), f"burst-{uuid.uuid4().hex[:12]}"
    return [
        BurstRequest(
            id=f"{burst_id}-{index}",
            num_prompt_tokens=draw.randint(*sizes.prompt),
            num_output_tokens=draw.randint(*sizes.output),
            max_tokens=sizes.max_tokens,
        )
        for index in range(sizes.num_requests)
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
