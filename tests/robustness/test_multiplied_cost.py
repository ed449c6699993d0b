"""The cost of a call with many answers is at most linear in its size and the number of answers together.

A body and its number of answers are multiplied by four at once: what is done for each answer and for each byte is done
four times as often, and what is done for every byte of every answer 16 times. Operations are counted, not time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from test_fuzz_cost import prepare
from tools.cost_cases import MAX_RATIO, MULTIPLIERS, PATHS, Case, multiplied_cases

from chairlift import AsyncLLM
from chairlift.engine.process.commands import Command
from chairlift.errors import RequestError
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.preparation.conversation import ModelPlanner
from server.api_model import with_api_tokenizer
from support.byte_tokenizer import VOCAB_SIZE
from support.fakes import make_engine, make_request
from support.operations import count_operations

FEWEST_ANSWERS: Final = {"n": 4, "16 prompts x n": 32, "beams": 4}
GROWTH: Final = 4
FEWEST_BYTES: Final = 1 << 10
MAX_GROWTH: Final = MAX_RATIO**2
COMPILED: Final = ("structured_outputs", "response_format", "tools")
"""Fields that become grammars. Other processes compile these, whose progress is no part of the count."""


LISTS_OF_PROMPTS: Final = ("prompt[]", "prompt (lists of token ids)", "prompt (long lists)")
"""Fields whose size is a number of prompts, each of which has all answers."""


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all tests, because an AsyncLLM serves one."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1 << 15)
    folder = with_api_tokenizer(tiny, tmp_path_factory.mktemp("multiplied"))
    llm = AsyncLLM(model=str(folder), num_kv_blocks=3000, num_threads=1)
    yield llm
    llm.close()


def small_and_large(multiplier: str) -> Iterator[tuple[Case, Case]]:
    """Each case with few answers, and the same one with GROWTH times as many."""
    fewest = FEWEST_ANSWERS[multiplier]
    cases = (multiplied_cases(multiplier, answers) for answers in (fewest, GROWTH * fewest))
    for small, large in zip(*cases, strict=True):
        if not small.field.startswith(COMPILED) and small.field not in LISTS_OF_PROMPTS:
            yield small, large


def start_all(llm: AsyncLLM, plan: Any) -> int:
    """Start the prompts of a plan as a server does, read the messages as an engine does, and return their bytes."""
    messages: list[bytes] = []
    llm._client.send = lambda command: messages.append(msgspec.msgpack.encode(command))  # type: ignore[method-assign]
    generations = []
    try:
        for text, token_ids in plan.prompts:
            generations.append(llm.start(text, token_ids, plan.params))
        for message in messages:
            for request in msgspec.msgpack.decode(message, type=Command).requests():
                request.to_request()
        return sum(map(len, messages))
    finally:
        for generation in generations:
            generation.abort()
        del llm._client.send


def costs(llm: AsyncLLM, planner: ModelPlanner, case: Case, size: int) -> tuple[int, int] | None:
    """The operations and the bytes between processes of a case; None if it is rejected."""
    body, found = case.body(size), []
    plan = prepare(planner, PATHS[case.endpoint], body)
    if isinstance(plan, RequestError):
        return None
    try:
        start_all(llm, plan)  # What is imported and cached at first use is no part of the growth.
    except RequestError:
        return None

    def call() -> None:
        found.append(start_all(llm, prepare(planner, PATHS[case.endpoint], body)))

    return count_operations(call), found[0]


@pytest.mark.parametrize("multiplier", MULTIPLIERS)
def test_cost_is_linear_in_size_and_answers_together(llm: AsyncLLM, runner: asyncio.Runner, multiplier: str) -> None:
    planner = ModelPlanner(llm.engine, ApiOptions())

    async def measure() -> list[tuple[str, tuple[int, int] | None, tuple[int, int] | None]]:
        return [
            (small.name, costs(llm, planner, small, FEWEST_BYTES), costs(llm, planner, large, GROWTH * FEWEST_BYTES))
            for small, large in small_and_large(multiplier)
        ]

    found = runner.run(measure())
    answered = [(name, few, many) for name, few, many in found if few is not None and many is not None]
    assert len(answered) > len(found) / 5, "most bodies are rejected"
    worst: dict[str, Any] = {}
    for name, few, many in answered:
        for what, counts in zip(("operations", "bytes"), zip(few, many, strict=True), strict=True):
            if counts[1] > MAX_GROWTH * counts[0]:
                worst[f"{name}, {what}"] = counts
    assert not worst


def test_queueing_siblings_is_linear_in_prompt_and_answers_together() -> None:
    """With a listener for events, which the meter and the log of waits write for each parked sibling."""

    def add(factor: int) -> int:
        core, *_ = make_engine(num_blocks=2048, block_size=16, max_model_len=8192)
        prompt, num_answers = list(range(512 * factor)), 64 * factor
        siblings = [make_request(f"r{at}", prompt, leader_id="r0" if at else None) for at in range(num_answers)]
        return count_operations(lambda: [core.add(request) for request in siblings])

    assert add(GROWTH) / add(1) <= MAX_GROWTH
