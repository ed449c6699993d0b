"""A session of a coding agent: its answers are sent back as received, and the prompt is found in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_model import with_api_tokenizer

from chairlift import AsyncLLM
from support.byte_tokenizer import VOCAB_SIZE
from support.running_server import RunningServer, run_server

NUM_TURNS = 20
LINE = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=%05x;"
RULES = "\n".join(f"Rule {index}: answer politely, and be brief." for index in range(130))
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
RESULT = "def add(a, b):\n    return a + b\n" * 4
MIN_CACHED = 0.95
Turn = tuple[list[dict[str, Any]], int, int]
"""The answer as messages to send back, the cached tokens of the prompt, and all of its tokens."""


@pytest.fixture(scope="module")
def server(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=16_384)
    folder = with_api_tokenizer(tiny, tmp_path_factory.mktemp("session"))
    llm = AsyncLLM(model=str(folder), num_kv_blocks=1200, num_threads=1, max_num_seqs=2)
    with run_server(llm, "tiny") as running:
        yield running


def claude_turn(server: RunningServer, number: int, messages: list[dict[str, Any]]) -> Turn:
    mark = {"cache_control": {"type": "ephemeral"}}
    body = {
        "system": [{"type": "text", "text": LINE % number}, {"type": "text", "text": RULES, **mark}],
        "messages": messages,
        "tools": [{"name": "read", "input_schema": SCHEMA}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "max_tokens": 24,
        "seed": number,
    }
    answer = server.post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    content, usage = answer.json()["content"], answer.json()["usage"]
    cached = usage["cache_read_input_tokens"]
    call = {"type": "tool_use", "id": f"t{number}", "name": "read", "input": {"path": f"{number}.py"}}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": RESULT}
    sent = [{"role": "assistant", "content": [*content, call]}, {"role": "user", "content": [result]}]
    return sent, cached, cached + usage["input_tokens"]


def chat_turn(server: RunningServer, number: int, messages: list[dict[str, Any]]) -> Turn:
    system = {"role": "system", "content": f"{LINE % number}\n{RULES}", "cache_control": {"type": "ephemeral"}}
    body = {
        "messages": [system, *messages],
        "tools": [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}],
        "max_tokens": 24,
        "seed": number,
    }
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    message, usage = answer.json()["choices"][0]["message"], answer.json()["usage"]
    call = {"id": f"t{number}", "type": "function", "function": {"name": "read", "arguments": '{"path": "cut'}}
    sent = [
        {**message, "tool_calls": [call], "provider_specific_fields": {"refusal": None}},
        {"role": "tool", "tool_call_id": call["id"], "content": RESULT},
    ]
    return sent, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


@pytest.mark.parametrize("send", [claude_turn, chat_turn])
def test_the_prompt_of_a_session_is_cached(server: RunningServer, send: Callable[..., Turn]) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix the tests."}]
    cached, total = [], []
    for number in range(NUM_TURNS):
        sent, num_cached, num_tokens = send(server, number, messages)
        messages += sent
        cached.append(num_cached)
        total.append(num_tokens)
    assert total[0] > 4000
    assert sum(cached[1:]) / sum(total[1:]) >= MIN_CACHED
