"""A mixed load and its checks: each request gets one answer, equal requests get equal answers, and no blocks leak."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from chairlift.events import EngineStarted, Step, from_json
from support.served import Served
from support.waiting import AMPLE_SECONDS

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
MAX_RETRY_SECONDS = 5.0
REPEATS = 4  # of each request, on average
COMMENT = ": keep-alive"
VOCABULARY = range(3, 190)
CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "[a-f]{2,6}"},
    {"choice": ["yes", "no", "perhaps"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"grammar": 'start: "x" /[0-9]{1,4}/ "y"'},
]
PATTERNS = (r"[a-f]{2,6}", r"yes|no|perhaps", r"\{.*\}", r"x[0-9]{1,4}y")


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """A request of the soak.

    Attributes:
        name: equal for equal requests.
        constraint: the index of its structured output in CONSTRAINTS, or None.
        aborts_after: the number of chunks after which the client disconnects, or None.
        is_rejected: whether the server must reject the request.
    """

    name: str
    body: dict[str, Any]
    constraint: int | None
    aborts_after: int | None = None
    is_rejected: bool = False


class Refused(Exception):
    """A status of 429 or 503 with the seconds of its Retry-After."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


@dataclass(slots=True)
class Tally:
    """The outcomes and answers of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    answers: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    output_tokens: int = 0

    @property
    def num_requests(self) -> int:
        return sum(self.outcomes.values())

    def check_repeat(self, name: str, answers: list[tuple[str, str]]) -> None:
        """Check that texts and finish reasons equal those of an earlier equal request."""
        known = self.answers.setdefault(name, answers)
        assert known == answers, f"{name} was answered {known} before and {answers} now"


def make_requests(count: int, seed: int) -> list[SoakRequest]:
    """Return `count` requests in random order, of which about REPEATS are equal."""
    rng = random.Random(seed)
    names = [f"{seed}.{index}" for index in range(max(1, count // REPEATS))]
    distinct = [_make_request(name, random.Random(name)) for name in names]
    return [_maybe_abort(rng.choice(distinct), rng) for _ in range(count)]


def _make_request(name: str, rng: random.Random) -> SoakRequest:
    constraint = rng.randrange(len(CONSTRAINTS)) if rng.random() < 0.2 else None
    body: dict[str, Any] = {
        "prompt": _prompt(rng),
        "max_tokens": rng.randint(1, 48),
        "n": rng.choice((1, 1, 1, 2, 4)),
        "seed": rng.getrandbits(16),
        "temperature": rng.choice((0, 0.8, 1.5)),
        "priority": rng.choice((-1, 0, 0, 0, 1)),
        "ignore_eos": constraint is None and rng.random() < 0.5,
        "stream": rng.random() < 0.7,
    }
    if constraint is not None:
        body["structured_outputs"] = CONSTRAINTS[constraint]
    if rng.random() < 0.1:
        body["logprobs"] = 2
    if rng.random() < 0.1:
        body["stop"] = ["e", "x y"]
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    is_rejected = rng.random() < 0.05
    if is_rejected:
        body["prompt"] = [5] * 4000
    return SoakRequest(name, body, constraint, is_rejected=is_rejected)


def _prompt(rng: random.Random) -> list[int]:
    """Return a prompt. Half of the prompts begin with one of a few long prefixes."""
    prefix: list[int] = []
    if rng.random() < 0.5:
        common = random.Random(rng.randrange(NUM_PREFIXES))
        prefix = [common.choice(VOCABULARY) for _ in range(common.randint(20, 90))]
    return prefix + [rng.choice(VOCABULARY) for _ in range(rng.randint(1, 60))]


def _maybe_abort(request: SoakRequest, rng: random.Random) -> SoakRequest:
    """Let one in six requests be aborted before, at or after its first chunk."""
    if rng.random() > 1 / 6 or request.is_rejected:
        return request
    return SoakRequest(request.name, request.body, request.constraint, aborts_after=rng.choice((0, 1, 1, 3, 8)))


async def run_load(
    url: str, requests: Iterable[SoakRequest], tally: Tally, *, secret: str | None = None, may_be_refused: bool = False
) -> None:
    """Send all requests, CONCURRENCY at a time, and raise an AssertionError at the first wrong answer.

    Args:
        secret: an API key.
        may_be_refused: whether the server may answer 429 or 503 with Retry-After. Such a request is counted, and the
            next one is sent after this time.
    """
    waiting = iter(requests)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=CONCURRENCY)
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=300, trust_env=False) as http:

        async def work() -> None:
            for request in waiting:
                try:
                    await _send(http, request, tally)
                except Refused as refused:
                    if not may_be_refused:
                        raise
                    tally.outcomes["refused"] += 1
                    await asyncio.sleep(min(refused.seconds, MAX_RETRY_SECONDS))

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(work())


async def _send(http: httpx.AsyncClient, request: SoakRequest, tally: Tally) -> None:
    for kind in ("structured_outputs", "logprobs", "stop", "stream"):
        tally.kinds[kind] += kind in request.body and request.body[kind] is not False
    tally.kinds["n > 1"] += request.body["n"] > 1
    tally.kinds["priority"] += request.body["priority"] != 0
    if not request.body["stream"]:
        await _send_whole(http, request, tally)
        return
    async with http.stream("POST", "/v1/completions", json=request.body) as response:
        if request.is_rejected:
            assert response.status_code == 400
            tally.outcomes["rejected"] += 1
            return
        if await _is_too_slow(response, tally):
            return
        assert response.status_code == 200, await response.aread()
        await _read_stream(response, request, tally)


async def _send_whole(http: httpx.AsyncClient, request: SoakRequest, tally: Tally) -> None:
    call = asyncio.ensure_future(http.post("/v1/completions", json=request.body))
    if request.aborts_after is not None:
        await asyncio.wait({call}, timeout=0.004 * request.aborts_after)
        if not call.done():
            call.cancel()
            await asyncio.wait({call})
            tally.outcomes["aborted"] += 1
            return
    response = await call
    if await _is_too_slow(response, tally):
        return
    assert response.status_code == (400 if request.is_rejected else 200), response.text
    if request.is_rejected:
        tally.outcomes["rejected"] += 1
        return
    body = response.json()
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    assert [choice["index"] for choice in choices] == list(range(request.body["n"]))
    answers = [(choice["text"], choice["finish_reason"]) for choice in choices]
    _check(request, answers, body["usage"]["completion_tokens"], tally)


async def _is_too_slow(response: httpx.Response, tally: Tally) -> bool:
    """Whether a grammar was rejected because a busy machine has not compiled it in time; raises Refused."""
    if response.status_code in (429, 503) and "Retry-After" in response.headers:
        raise Refused((await response.aread()).decode(), float(response.headers["Retry-After"]))
    is_slow = response.status_code == 400 and b"to compile. Simplify it." in await response.aread()
    tally.outcomes["too slow"] += is_slow
    return is_slow


async def _read_stream(response: httpx.Response, request: SoakRequest, tally: Tally) -> None:
    texts = [""] * request.body["n"]
    ends: dict[int, str] = {}
    num_chunks = num_done = num_tokens = 0
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            assert not line or line == COMMENT
            continue
        assert not num_done, "a line follows [DONE]"
        if request.aborts_after is not None and num_chunks >= request.aborts_after:
            tally.outcomes["aborted"] += 1
            return
        num_chunks += 1
        if line == "data: [DONE]":
            num_done += 1
            continue
        chunk = json.loads(line[6:])
        assert "error" not in chunk, chunk
        num_tokens += (chunk.get("usage") or {}).get("completion_tokens", 0)
        for choice in chunk["choices"]:
            assert choice["index"] not in ends, "text follows the finish reason"
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"] is not None:
                ends[choice["index"]] = choice["finish_reason"]
    assert num_done == 1
    assert len(ends) == request.body["n"], "each answer ends once"
    _check(request, [(text, ends[index]) for index, text in enumerate(texts)], num_tokens, tally)


def _check(request: SoakRequest, answers: list[tuple[str, str]], num_tokens: int, tally: Tally) -> None:
    body = request.body
    assert 0 < num_tokens <= body["n"] * body["max_tokens"]
    if body["ignore_eos"] and "stop" not in body:
        assert num_tokens == body["n"] * body["max_tokens"]
    for text, reason in answers:
        assert reason in ("stop", "length")
        if request.constraint is not None and reason == "stop" and "stop" not in body:
            assert re.fullmatch(PATTERNS[request.constraint], text), (
                f"{text!r} violates constraint {request.constraint}"
            )
    tally.check_repeat(request.name, answers)
    tally.output_tokens += num_tokens
    tally.outcomes["answered"] += 1


async def wait_until_idle(served: Served, seconds: float = AMPLE_SECONDS) -> None:
    """Wait until no engine has unfinished requests, and the server lists none."""
    deadline = asyncio.get_running_loop().time() + seconds
    names = [card["id"] for card in served.get("/v1/models")["data"] if card["parent"] is None]
    while any(map(served.num_unfinished, names)) or served.get("/v1/requests")["data"]:
        assert asyncio.get_running_loop().time() < deadline, f"not ended: {served.get('/v1/requests')}"
        await asyncio.sleep(0.05)


def check_pool(served: Served, model: str) -> None:
    """Check with a single short request that all other blocks and slots of a model are free."""
    body = {"model": model, "prompt": [3], "max_tokens": 1, "cache_salt": "check_pool"}
    with httpx.stream("GET", f"{served.url}/v1/events?model={model}", timeout=AMPLE_SECONDS) as stream:
        lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: "))
        started = from_json(next(lines))
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=AMPLE_SECONDS).raise_for_status()
        steps = (event for event in map(from_json, lines) if isinstance(event, Step))
        # The last step of an earlier request may be reported late.
        step = next(step for step in steps if any(each.startswith(answer.json()["id"]) for each in step.request_ids))
    assert isinstance(started, EngineStarted)
    assert step.free_blocks == started.num_blocks - 1, step
    assert step.num_waiting == 0
    assert step.free == step.free_blocks * started.block_size, step
    assert served.get(f"/v1/engine?model={model}")["pool"]["held_blocks"] == 0
