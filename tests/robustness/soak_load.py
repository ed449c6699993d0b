"""A load that has a bit of everything, and the checks that go with it: each request is answered exactly once, whoever
asks the same again gets the same, and afterwards nothing is left of it."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
from served import Served

from chairlift.events import EngineStarted, Step, from_json

SERVER_OPTIONS: dict[str, Any] = {
    "num_kv_blocks": 48,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "scheduling_policy": "priority",
    "served_model_name": "tiny",
}
CONCURRENCY = 32
NUM_PREFIXES = 6
REPEATS = 4  # of each request, on average
VOCABULARY = range(3, 190)
CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "[a-f]{2,6}"},
    {"choice": ["yes", "no", "perhaps"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"grammar": 'start: "x" /[0-9]{1,4}/ "y"'},
]
PATTERNS = (r"[a-f]{2,6}", r"yes|no|perhaps", r"\{.*\}", r"x[0-9]{1,4}y")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: its body; `constraint` is the index of its structured output. One with a priority may overtake others
    and one with `leaves_after` chunks is given up then."""

    name: str
    body: dict[str, Any]
    constraint: int | None
    leaves_after: int | None = None
    is_refused: bool = False


@dataclass(slots=True)
class Tally:
    """What came of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    answers: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    output_tokens: int = 0

    @property
    def num_requests(self) -> int:
        return sum(self.outcomes.values())

    def same_again(self, name: str, answers: list[tuple[str, str]]) -> None:
        """Texts and finish reasons, which have to be those of the last time."""
        known = self.answers.setdefault(name, answers)
        assert known == answers, f"{name} was answered {known} before and {answers} now"


def make_asks(count: int, seed: int) -> list[Ask]:
    """`count` requests, in groups of equals in random order."""
    chosen = random.Random(seed)
    distinct = [_make_ask(index, random.Random(f"{seed}.{index}")) for index in range(max(1, count // REPEATS))]
    return [_in_a_hurry(chosen.choice(distinct), chosen) for _ in range(count)]


def _make_ask(index: int, chosen: random.Random) -> Ask:
    constraint = chosen.randrange(len(CONSTRAINTS)) if chosen.random() < 0.2 else None
    body: dict[str, Any] = {
        "prompt": _prompt(chosen),
        "max_tokens": chosen.randint(1, 48),
        "n": chosen.choice((1, 1, 1, 2, 4)),
        "seed": index,
        "temperature": chosen.choice((0, 0.8, 1.5)),
        "priority": chosen.choice((-1, 0, 0, 0, 1)),
        "ignore_eos": constraint is None and chosen.random() < 0.5,
        "stream": chosen.random() < 0.7,
    }
    if constraint is not None:
        body["structured_outputs"] = CONSTRAINTS[constraint]
    if chosen.random() < 0.1:
        body["logprobs"] = 2
    if chosen.random() < 0.1:
        body["stop"] = ["e", "x y"]
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    is_refused = chosen.random() < 0.05
    if is_refused:
        body["max_tokens"] = 4000
    return Ask(f"r{index}", body, constraint, is_refused=is_refused)


def _prompt(chosen: random.Random) -> list[int]:
    """Half of them begin with one of a few long prefixes."""
    prefix: list[int] = []
    if chosen.random() < 0.5:
        common = random.Random(chosen.randrange(NUM_PREFIXES))
        prefix = [common.choice(VOCABULARY) for _ in range(common.randint(20, 90))]
    return prefix + [chosen.choice(VOCABULARY) for _ in range(chosen.randint(1, 60))]


def _in_a_hurry(ask: Ask, chosen: random.Random) -> Ask:
    """One in six is given up, at its first chunk or later, or without having seen any."""
    if chosen.random() > 1 / 6 or ask.is_refused:
        return ask
    return Ask(ask.name, ask.body, ask.constraint, leaves_after=chosen.choice((0, 1, 1, 3, 8)))


async def run_load(url: str, asks: list[Ask], tally: Tally) -> None:
    """All of them, CONCURRENCY at a time; raises AssertionError at the first wrong answer."""
    waiting = iter(asks)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60, trust_env=False) as http:

        async def work() -> None:
            for ask in waiting:
                await _ask(http, ask, tally)

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(work())


async def _ask(http: httpx.AsyncClient, ask: Ask, tally: Tally) -> None:
    for kind in ("structured_outputs", "logprobs", "stop", "stream"):
        tally.kinds[kind] += kind in ask.body and ask.body[kind] is not False
    tally.kinds["n > 1"] += ask.body["n"] > 1
    tally.kinds["priority"] += ask.body["priority"] != 0
    if not ask.body["stream"]:
        await _ask_whole(http, ask, tally)
        return
    async with http.stream("POST", "/v1/completions", json=ask.body) as response:
        if ask.is_refused:
            assert response.status_code == 400
            tally.outcomes["refused"] += 1
            return
        assert response.status_code == 200, await response.aread()
        await _read_stream(response, ask, tally)


async def _ask_whole(http: httpx.AsyncClient, ask: Ask, tally: Tally) -> None:
    call = asyncio.ensure_future(http.post("/v1/completions", json=ask.body))
    if ask.leaves_after is not None:
        await asyncio.wait({call}, timeout=0.004 * ask.leaves_after)
        if not call.done():
            call.cancel()
            await asyncio.wait({call})
            tally.outcomes["given up"] += 1
            return
    response = await call
    assert response.status_code == (400 if ask.is_refused else 200), response.text
    if ask.is_refused:
        tally.outcomes["refused"] += 1
        return
    body = response.json()
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    assert [choice["index"] for choice in choices] == list(range(ask.body["n"]))
    answers = [(choice["text"], choice["finish_reason"]) for choice in choices]
    _check(ask, answers, body["usage"]["completion_tokens"], tally)


async def _read_stream(response: httpx.Response, ask: Ask, tally: Tally) -> None:
    texts = [""] * ask.body["n"]
    ends: dict[int, str] = {}
    num_chunks = num_done = num_tokens = 0
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            assert not line
            continue
        assert not num_done, "something comes after [DONE]"
        if ask.leaves_after is not None and num_chunks >= ask.leaves_after:
            tally.outcomes["given up"] += 1
            return
        num_chunks += 1
        if line == "data: [DONE]":
            num_done += 1
            continue
        chunk = json.loads(line[6:])
        assert "error" not in chunk, chunk
        num_tokens += (chunk.get("usage") or {}).get("completion_tokens", 0)
        for choice in chunk["choices"]:
            assert choice["index"] not in ends, "something comes after the end"
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"] is not None:
                ends[choice["index"]] = choice["finish_reason"]
    assert num_done == 1
    assert len(ends) == ask.body["n"], "each answer ends once"
    _check(ask, [(text, ends[index]) for index, text in enumerate(texts)], num_tokens, tally)


def _check(ask: Ask, answers: list[tuple[str, str]], num_tokens: int, tally: Tally) -> None:
    body = ask.body
    assert 0 < num_tokens <= body["n"] * body["max_tokens"]
    if body["ignore_eos"] and "stop" not in body:
        assert num_tokens == body["n"] * body["max_tokens"]
    for text, reason in answers:
        assert reason in ("stop", "length")
        if ask.constraint is not None and reason == "stop" and "stop" not in body:
            assert re.fullmatch(PATTERNS[ask.constraint], text), f"{text!r} is none of {CONSTRAINTS[ask.constraint]}"
    tally.same_again(ask.name, answers)
    tally.output_tokens += num_tokens
    tally.outcomes["answered"] += 1


async def wait_until_idle(served: Served, seconds: float = 20.0) -> None:
    """Until the engine has nothing to do and the server has closed what clients left behind."""
    deadline = asyncio.get_running_loop().time() + seconds
    while served.get("/v1/engine")["status"]["num_unfinished"]:
        assert asyncio.get_running_loop().time() < deadline, "requests are still in the engine"
        await asyncio.sleep(0.05)


def check_pool(served: Served) -> None:
    """One short request alone: every block but its own is free."""
    body = {"prompt": [3], "max_tokens": 1, "cache_salt": "nobody else's"}
    with httpx.stream("GET", f"{served.url}/v1/events", timeout=20) as stream:
        lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: "))
        started = from_json(next(lines))
        httpx.post(f"{served.url}/v1/completions", json=body, timeout=20).raise_for_status()
        step = next(event for event in map(from_json, lines) if isinstance(event, Step))
    assert isinstance(started, EngineStarted)
    assert step.free_blocks == started.num_blocks - 1, step
    assert step.num_waiting == 0
    assert served.get("/v1/engine")["pool"]["held_blocks"] == 0
