"""A large body gives the same response as a small one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_model import with_api_tokenizer

from byte_tokenizer import VOCAB_SIZE
from chairlift import AsyncLLM
from chairlift.server.http.body_limits import LARGE_BODY
from plain_http import NO_TLS
from running_server import RunningServer, run_server

PADDING = b" " * LARGE_BODY
MESSAGES = [{"role": "user", "content": "one two"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "boolean"}}}
WRONG_SCHEMA = {"type": "nothing"}
WRONG_FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": WRONG_SCHEMA}}
WRONG_OUTPUT = {"format": {"type": "json_schema", "schema": WRONG_SCHEMA}}
FORCED = {"tools": TOOLS, "tool_choice": "required"}
NAMESPACE = {
    "tools": [{"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "look"}]}],
    "tool_choice": {"type": "function", "name": "look", "namespace": "ns"},
}
GREEDY = {"temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def server(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
    folder = with_api_tokenizer(tiny, tmp_path_factory.mktemp("large_bodies"))
    llm = AsyncLLM(model=str(folder), num_kv_blocks=200, num_threads=1, enable_prefix_caching=False)
    with run_server(llm, "tiny") as running:
        yield running


def post(server: RunningServer, path: str, content: bytes) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=60, verify=NO_TLS)


def without_ids(value: Any) -> Any:
    """A response without the fields that differ between two equal calls."""
    if isinstance(value, dict):
        changing = {"id", "created", "created_at", "completed_at", "call_id"}
        return {key: without_ids(entry) for key, entry in value.items() if key not in changing}
    return [without_ids(entry) for entry in value] if isinstance(value, list) else value


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "one two", "max_tokens": 4, "echo": True, "logprobs": 1, **GREEDY}),
    ("/v1/completions", {"prompt": [[3, 4], [5]], "max_tokens": 2, "n": 2, **GREEDY}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 6, "structured_outputs": {"choice": ["yes", "no"]}, **GREEDY}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, **GREEDY}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 30, **FORCED, **GREEDY}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 9, "response_format": SCHEMA, **GREEDY}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "stop": ["zz"], "bad_words": ["a"], **GREEDY}),
    ("/v1/responses", {"input": "one", "max_output_tokens": 4, "instructions": "be", "metadata": {"a": "b"}, **GREEDY}),
    ("/v1/responses", {"input": "one", "max_output_tokens": 9, **NAMESPACE, **GREEDY}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4, "system": "be", **GREEDY}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/tokenize", {"prompt": "one two", "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [3, 4, 5]}),
    # -- errors --
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": MESSAGES, "model": "other"}),
    ("/v1/chat/completions", {"messages": MESSAGES, "top_logprobs": 3}),
    ("/v1/chat/completions", {"messages": MESSAGES, "response_format": WRONG_FORMAT}),
    ("/v1/completions", {"prompt": [], "max_tokens": 1}),
    ("/v1/completions", {"prompt": "x", "nonsense": 1}),
    ("/v1/completions", {"prompt": "x", "stop": ["\ud800"]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\udc00"}]}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": -1}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 100_000}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 2, "min_tokens": 3}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, "output_config": WRONG_OUTPUT}),
    ("/detokenize", {"tokens": [999_999]}),
]


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_the_response_does_not_depend_on_the_size(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    small, large = post(server, path, content), post(server, path, content + PADDING)
    assert large.status_code == small.status_code
    assert without_ids(large.json()) == without_ids(small.json())


def test_a_stream_does_not_depend_on_the_size_of_the_body(server: RunningServer) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 4, "stream": True, **GREEDY}).encode()

    def deltas(content: bytes) -> list[Any]:
        lines = post(server, "/v1/chat/completions", content).text.splitlines()
        return [without_ids(json.loads(line[6:])) for line in lines if line.startswith("data: {")]

    assert deltas(body + PADDING) == deltas(body)
    assert len(deltas(body)) > 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"prompt": ' + PADDING, "not valid JSON"),
        (b"[" * 70 + PADDING, "70 deep, and at most 64 levels"),
        (b'{"prompt": "\xff"}' + PADDING, "invalid unicode code point"),
    ],
)
def test_large_bodies_that_are_not_json_are_reported(server: RunningServer, content: bytes, problem: str) -> None:
    answer = post(server, "/v1/completions", content)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


def test_large_bodies_need_the_content_type_of_json(server: RunningServer) -> None:
    for headers in ({"Content-Type": "text/plain"}, {}):
        answer = httpx.post(f"{server.url}/v1/completions", content=b"[" * 100_000, headers=headers, verify=NO_TLS)
        assert answer.status_code == 400
        assert "Content-Type: application/json" in answer.json()["error"]["message"]
