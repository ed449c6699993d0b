"""Requests that do not fit into the context of the model: errors that clients recognize, and lowered limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_model import with_api_tokenizer

from chairlift import AsyncLLM
from chairlift.server.api.routes import LARGE_BODY
from chairlift.server.preparation.api_options import ApiOptions
from support.byte_tokenizer import VOCAB_SIZE
from support.running_server import RunningServer, run_server

CONTEXT = 96
LONG = "x" * 2 * CONTEXT
HUGE = "x" * LARGE_BODY
MESSAGE = {"role": "user", "content": "Hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["Hi", "Hello, you two"], "max_tokens": 4},
    "/v1/chat/completions": {"messages": [MESSAGE], "max_completion_tokens": 4},
    "/v1/responses": {"input": [MESSAGE], "max_output_tokens": 4},
    "/v1/messages": {"messages": [MESSAGE], "max_tokens": 4},
}
LIMITS = {path: next(name for name in body if name.startswith("max_")) for path, body in BODIES.items()}
PROMPTS = {path: next(iter(body)) for path, body in BODIES.items()}


def prompt(path: str, text: str) -> dict[str, Any]:
    name = PROMPTS[path]
    return {name: text if name == "prompt" else [{**MESSAGE, "content": text}]}


@pytest.fixture(scope="module", params=[False, True], ids=["strict", "default"])
def is_clamping(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def server(
    tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, is_clamping: bool
) -> Iterator[RunningServer]:
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT)
    folder = with_api_tokenizer(tiny, tmp_path_factory.mktemp("context"))
    llm = AsyncLLM(model=str(folder), num_kv_blocks=100, num_threads=1, max_num_seqs=4)
    with run_server(llm, "tiny", api=ApiOptions(clamp_max_tokens=is_clamping)) as running:
        yield running


@pytest.mark.parametrize("text", [LONG, HUGE], ids=["long", "huge"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_prompt_that_is_too_long_has_the_code_of_openai(server: RunningServer, path: str, text: str) -> None:
    for stream in (False, True):
        answer = server.post(path, {**BODIES[path], **prompt(path, text), "stream": stream})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", PROMPTS[path])
        assert f"This model's maximum context length is {CONTEXT} tokens" in error["message"]
        assert "Shorten it" in error["message"]


@pytest.mark.parametrize("text", [LONG, HUGE], ids=["long", "huge"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_prompt_that_is_too_long_has_the_message_of_anthropic(server: RunningServer, path: str, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    answer = server.post(path, body if path == "/v1/messages" else {"messages": body["messages"]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
    assert found is not None
    assert len(text) // 8 <= int(found[1]) <= len(text) + 50
    assert int(found[2]) == CONTEXT - 1


@pytest.mark.parametrize("path", BODIES)
def test_a_limit_beyond_the_context_is_lowered_or_rejected(server: RunningServer, is_clamping: bool, path: str) -> None:
    for stream in (False, True):
        body = {**BODIES[path], LIMITS[path]: 32_000, "ignore_eos": True, "stream": stream}
        answer = server.post(path, body)
        if is_clamping or path == "/v1/messages":
            assert answer.status_code == 200
            usage = server.post(path, {**body, "stream": False}).json()["usage"]
            num_output_tokens = usage.get("completion_tokens", usage.get("output_tokens"))
            if path == "/v1/completions":  # Its second prompt is longer.
                num_output_tokens = CONTEXT - server.post("/tokenize", {"prompt": body["prompt"][1]}).json()["count"]
            assert answer.headers["x-chairlift-max-tokens"] == str(num_output_tokens)
            continue
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", LIMITS[path])
        assert "x-chairlift-max-tokens" not in answer.headers
        assert f"{LIMITS[path]}=32000 is too large" in error["message"]
        assert f"This model's maximum context length is {CONTEXT} tokens" in error["message"]


def test_each_prompt_fills_the_context_up_to_a_lowered_limit(server: RunningServer, is_clamping: bool) -> None:
    body = {"messages": [MESSAGE], "max_tokens": 32_000, "ignore_eos": True}
    usage = server.post("/v1/messages", body).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == CONTEXT
    if is_clamping:
        body = {**BODIES["/v1/completions"], "max_tokens": 32_000, "ignore_eos": True}
        assert server.post("/v1/completions", body).json()["usage"]["total_tokens"] == 2 * CONTEXT


def test_a_truncated_prompt_is_not_empty_beside_a_lowered_limit(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 32_000, "truncate_prompt_tokens": -1}
    usage = server.post("/v1/messages", body).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == CONTEXT - 1
