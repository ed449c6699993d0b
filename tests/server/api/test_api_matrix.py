"""Sends every body of the matrix with the official client, with and without streaming.

The responses must have the types of the client, and the deltas of a stream must add up to the complete response.
"""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, get_args

import httpx
import openai
import pytest
from api_matrix import CHATS, COMPLETIONS, MESSAGES, RESPONSES, Row
from api_model import CHAT_TEMPLATE, check_type, raw
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from support.running_server import RunningServer

COMMON: Row = {"model": "tiny", "seed": 1}
USAGE = {"include_usage": True, "continuous_usage_stats": True}
EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}


@pytest.fixture(scope="module")
def server(api_server: RunningServer) -> RunningServer:
    return api_server


def call(create: Callable[..., Any], row: Row) -> Any:
    """Call the client with the fields that it has parameters for, and with the other fields in `extra_body`."""
    known = inspect.signature(create).parameters
    return create(
        **{name: value for name, value in row.items() if name in known},
        extra_body={name: value for name, value in row.items() if name not in known},
    )


def row_id(row: Row) -> str:
    return json.dumps(row)[:60]


def summed(choices: Iterator[Row], add: Callable[[Row, Row], None]) -> dict[int, Row]:
    """The choices of a stream, joined by `add`, with the last finish_reason and stop_reason."""
    sums: dict[int, Row] = defaultdict(lambda: defaultdict(str))
    for choice in choices:
        total = sums[choice["index"]]
        add(total, choice)
        for name in ("finish_reason", "stop_reason"):
            total[name] = choice.get(name) if choice.get(name) is not None else total.get(name)
        total["token_ids"] = [*(total["token_ids"] or []), *choice.get("token_ids", [])]
    return sums


def check_ends(whole: Row, total: Row) -> None:
    assert total["finish_reason"] == whole["finish_reason"]
    assert total["stop_reason"] == whole["stop_reason"]
    assert total["token_ids"] == whole.get("token_ids", [])


def check_usage(chunks: list[Row], whole: Row) -> None:
    assert chunks[-1]["usage"] == whole["usage"] or "cached_tokens" in json.dumps(whole["usage"])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][name] == whole["usage"][name]
    running = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"]]
    assert running == sorted(running)


def check_completion(value: Row) -> None:
    """Validate with the type of OpenAI, whose finish_reason and logprobs of an echoed first token are not optional."""
    completion = json.loads(json.dumps(value))
    for choice in completion["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        if choice["logprobs"] and choice["logprobs"]["token_logprobs"][:1] == [None]:
            choice["logprobs"]["token_logprobs"][0] = 0.0
            choice["logprobs"]["top_logprobs"][0] = {}
    check_type(Completion, completion)


def add_completion(total: Row, choice: Row) -> None:
    total["text"] += choice["text"]
    for name, values in (choice["logprobs"] or {}).items():
        total[name] = [*(total[name] or []), *values]


@pytest.mark.parametrize("row", COMPLETIONS, ids=row_id)
def test_completions(server: RunningServer, row: Row) -> None:
    create = server.client().completions.create
    row = {**COMMON, "prompt": "The quick brown", "max_tokens": 6, "temperature": 0, **row}
    whole = raw(call(create, row))
    chunks = [raw(chunk) for chunk in call(create, {**row, "stream": True, "stream_options": USAGE})]
    for value in (whole, *chunks):
        check_completion(value)
    timings = [chunk for chunk in chunks if "timings" in chunk]
    assert len(timings) == ("timings" in whole) == ("timings" in row)
    check_usage([chunk for chunk in chunks if "timings" not in chunk], whole)
    totals = summed((choice for chunk in chunks for choice in chunk["choices"]), add_completion)
    assert len(totals) == len(whole["choices"])
    for choice in whole["choices"]:
        total = totals[choice["index"]]
        assert total["text"] == choice["text"]
        check_ends(choice, total)
        for name, values in (choice["logprobs"] or {}).items():
            assert total[name] == values


def add_chat(total: Row, choice: Row) -> None:
    delta = choice["delta"]
    total["content"] += delta.get("content") or ""
    total["reasoning_content"] += delta.get("reasoning_content") or ""
    total["calls"] = total["calls"] or []
    for part in delta.get("tool_calls", []):
        if "id" in part:
            assert part["index"] == len(total["calls"])
            total["calls"].append([part["function"]["name"], ""])
        total["calls"][part["index"]][1] += part["function"]["arguments"]
    total["logprobs"] = [*(total["logprobs"] or []), *((choice["logprobs"] or {}).get("content", []))]


@pytest.mark.parametrize("row", CHATS, ids=row_id)
def test_chats(server: RunningServer, row: Row) -> None:
    create = server.client().chat.completions.create
    row = {**COMMON, "messages": MESSAGES, "temperature": 0, **row}
    row = row if {"max_tokens", "max_completion_tokens"} & row.keys() else {**row, "max_tokens": 6}
    whole = raw(call(create, row))
    chunks = [raw(chunk) for chunk in call(create, {**row, "stream": True, "stream_options": USAGE})]
    check_type(ChatCompletion, whole)
    for chunk in chunks:
        check_type(ChatCompletionChunk, chunk)
    check_usage([chunk for chunk in chunks if "timings" not in chunk], whole)
    totals = summed((choice for chunk in chunks for choice in chunk["choices"]), add_chat)
    for choice in whole["choices"]:
        total, message = totals[choice["index"]], choice["message"]
        assert total["content"] == (message["content"] or "")
        assert total["reasoning_content"] == message.get("reasoning_content", "")
        calls = [[entry["function"]["name"], entry["function"]["arguments"]] for entry in message.get("tool_calls", [])]
        assert total["calls"] == calls
        assert total["logprobs"] == (choice["logprobs"] or {}).get("content", [])
        check_ends(choice, total)


def without_ids(items: list[Row]) -> list[Row]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


@pytest.mark.parametrize("row", RESPONSES, ids=row_id)
def test_responses(server: RunningServer, row: Row) -> None:
    create = server.client().responses.create
    row = {**COMMON, "input": "Hello", "temperature": 0, "max_output_tokens": 6, **row}
    whole = raw(call(create, row))
    check_type(Response, whole)
    events = [raw(event) for event in call(create, {**row, "stream": True})]
    for event in events:
        check_type(EVENTS[event["type"]], event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert last["status"] == whole["status"]
    assert without_ids(last["output"]) == without_ids(whole["output"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    for index, item in enumerate(last["output"]):
        deltas = [e for e in events if e["type"].endswith(".delta") and e["output_index"] == index]
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(e["delta"] for e in deltas if "summary" not in e["type"]) == text
        summary = "".join(e["delta"] for e in deltas if "summary" in e["type"])
        assert summary == (text if item["type"] == "reasoning" else "")


def test_models_and_tokens(server: RunningServer) -> None:
    from openai.types import Model

    client: openai.OpenAI = server.client()
    (model,) = client.models.list().data
    own_fields = {"max_model_len", "aliases", "status", "root", "parent", "type", "display_name", "created_at"}
    check_type(Model, {name: value for name, value in raw(model).items() if name not in own_fields})
    assert raw(model)["status"]["value"] == "loaded"
    tokens = server.post("/tokenize", {"prompt": "naïve", "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    without = server.post("/tokenize", {"prompt": "naïve", "add_special_tokens": False}).json()["tokens"]
    assert tokens["tokens"][1:] == without
    assert server.post("/detokenize", {"tokens": without}).json() == {"prompt": "naïve"}
    info = httpx.get(f"{server.url}/tokenizer_info").json()
    described = httpx.get(f"{server.url}/openapi.json").json()["paths"]["/tokenizer_info"]["get"]["responses"]
    assert described.keys() >= {"403", "404", "429", "503"}
    assert info["chat_template"] == CHAT_TEMPLATE
    assert server.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False}).json()["count"] == 1
    assert httpx.get(f"{server.url}/tokenizer_info", params={"model": "other"}).status_code == 404
    chat = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": chat}).json() == {"prompt": "user: Hello\nassistant: "}
