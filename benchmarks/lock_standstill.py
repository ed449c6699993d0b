"""Measures how long the calls of one caller stop all other Python threads, at the permitted sizes.

    python -m benchmarks.lock_standstill [--model NAME] [--rounds 3] [--seed 0] [--only TEXT] [--json]

While one thread parses a body, plans its request (render, tokenize, check) and creates the requests of the engine,
another one sleeps for a millisecond in a loop. The table has the largest processor time that the first thread used
between two wake-ups of the other one, which is the time for which a call holds Python's lock. The load of the machine
by other programs changes it little. "CPU" is the processor time of the whole call.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec
from benchmarks.common import print_result, run_interleaved, spread
from rich.table import Table

from chairlift import LLM
from chairlift.errors import RequestError
from chairlift.loading.fetch import DEFAULT_MODEL
from chairlift.server.api import chat, completions, messages, responses, tokenization
from chairlift.server.api.routes import parse_large_json
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.preparation.conversation import ModelPlanner, RequestPlan
from chairlift.server.protocol.base import MAX_MESSAGES, MAX_PROMPTS

MAX_BODY = 8 << 20  # bytes
TEXT = 5_000_000  # bytes, which earlier versions tokenized whole if they were truncated
REJECTED = 640_000  # bytes, which could be few enough tokens of the default model
WORDS = ["the", "a", "of", "lock", "thread", "token", "it's", "don't", "several", "12", "345,", "and", "(is);", ":"]
SETUP_SECONDS = 0.05
PARTS = ("parse s", "plan s", "create s", "CPU s")

Result = TypeVar("Result")


def text_of(draw: random.Random, size: int) -> str:
    """English-like text of this many characters."""
    return " ".join(draw.choices(WORDS, k=size // 2))[:size]


def bodies(draw: random.Random) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Endpoint and body of each call."""
    text, ids = text_of(draw, TEXT), [draw.randrange(100, 40_000) for _ in range(MAX_BODY // 7)]
    cut = {"truncate_prompt_tokens": -1, "max_tokens": 8}

    def turn(content: str) -> dict[str, str]:
        return {"role": "user", "content": content}

    turns = [turn(text_of(draw, 1000)) for _ in range(MAX_MESSAGES - 1)]
    chatted, completed = chat.create_chat_completion, completions.create_completion
    special = "<|im_start|>" * (TEXT // 12)
    schema = {"type": "object", "properties": {f"name{index}": {"type": "string"} for index in range(400)}}
    return {
        "completion, 5 MB of words, truncated": (completed, {"prompt": text, **cut}),
        "completion, 5 MB without spaces, truncated": (completed, {"prompt": "a" * TEXT, **cut}),
        "completion, 640 kB of words, rejected": (completed, {"prompt": text[:REJECTED]}),
        "completion, 640 kB without spaces, rejected": (completed, {"prompt": "x1-" * (REJECTED // 3)}),
        "completion, 1.2 million token ids, truncated": (completed, {"prompt": ids, **cut}),
        "completion, 2,048 prompts": (completed, {"prompt": [text[:2000]] * MAX_PROMPTS, "max_tokens": 1}),
        "completion, 524,288 stop_token_ids": (completed, {"prompt": "a", "stop_token_ids": ids[: 1 << 19]}),
        "completion, 524,288 allowed_token_ids": (completed, {"prompt": "a", "allowed_token_ids": ids[: 1 << 19]}),
        "completion, 8,192 characters of bad words": (completed, {"prompt": "a", "bad_words": ["ab" * 32] * 128}),
        "chat, one message of 5 MB, truncated": (chatted, {"messages": [turn(text)], **cut}),
        "chat, 4,096 messages, truncated": (chatted, {"messages": turns, **cut}),
        "chat, 5 MB of <|im_start|>, truncated": (chatted, {"messages": [turn(special)], **cut}),
        "chat, 640 kB of <|im_start|>, rejected": (chatted, {"messages": [turn(special[:REJECTED])]}),
        "chat, a schema of 400 fields": (
            chatted,
            {
                "messages": [turn("a")],
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            },
        ),
        "responses, 640 kB, rejected": (responses.create_response, {"input": text[:REJECTED]}),
        "messages, 640 kB, rejected": (
            messages.create_message,
            {"messages": [turn(text[:REJECTED])], "max_tokens": 8, "model": "a"},
        ),
        "tokenize, 32,000 characters": (
            tokenization.tokenize_text,
            {"prompt": text[:32_000], "return_token_strs": True},
        ),
        "tokenize, 640 kB, rejected": (tokenization.tokenize_text, {"prompt": text[:REJECTED]}),
        "detokenize, 65,536 token ids": (tokenization.detokenize_ids, {"tokens": ids[: 1 << 16]}),
    }


def measure_call(planner: ModelPlanner, endpoint: Any, body: dict[str, Any]) -> dict[str, float]:
    """The standstill of each part of a call, which may be rejected, and the processor time of all parts."""
    raw, processor = msgspec.json.encode(body), planner.engine.input_processor
    assert len(raw) <= MAX_BODY, f"{len(raw)} bytes"
    seconds = dict.fromkeys(PARTS, 0.0)
    started = time.thread_time()
    parsed, seconds["parse s"] = watched(lambda: parse_large_json(endpoint.body, raw))
    if not isinstance(parsed, RequestError):
        plan, seconds["plan s"] = watched(lambda: endpoint.plan(planner, parsed))
        if isinstance(plan, RequestPlan):
            prompts, params = plan.prompts, plan.params
            _requests, seconds["create s"] = watched(
                lambda: [processor.make("a", token_ids, params, arrival_time=0.0) for _text, token_ids in prompts]
            )
    seconds["CPU s"] = time.thread_time() - started
    return seconds


def watched(function: Callable[[], Result]) -> tuple[Result, float]:
    """Call a function; returns its result and the largest standstill of another thread.

    If the function raises RequestError, this error is the result.
    """
    is_done, largest = threading.Event(), 0.0
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def watch() -> None:
        nonlocal largest
        last = time.clock_gettime(clock)
        while not is_done.is_set():
            time.sleep(0.001)
            now = time.clock_gettime(clock)
            largest, last = max(largest, now - last), now

    thread = threading.Thread(target=watch)
    thread.start()
    time.sleep(SETUP_SECONDS)
    try:
        result: Any = function()
    except RequestError as error:
        result = error
    finally:
        is_done.set()
        thread.join()
    return result, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="measure the calls whose names contain this text")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    planner = ModelPlanner(LLM(args.model).engine, ApiOptions())
    chosen = {name: case for name, case in bodies(random.Random(args.seed)).items() if args.only in name}

    def measure(name: str) -> dict[str, float]:
        return measure_call(planner, *chosen[name])

    results = run_interleaved({name: partial(measure, name) for name in chosen}, args.rounds, num_warmups=0)
    table = Table("call", *PARTS)
    for name, rows in results.items():
        table.add_row(name, *(spread([row[part] for row in rows], 2) for part in PARTS))
    versions = {name: version(name) for name in ("tokenizers", "pydantic", "msgspec", "jinja2")}
    print_result("lock_standstill", vars(args) | versions, results, [table], as_json=args.json)


if __name__ == "__main__":
    main()
