"""Answers that begin with reasoning and then follow a structure, with a model that is biased to reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from chat_planner import planner

from chairlift import AsyncLLM
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.protocol.messages import MessagesRequest
from support.byte_tokenizer import VOCAB_SIZE, with_byte_tokenizer
from support.running_server import RunningServer, run_server

TEMPLATE = """\
{%- for m in messages %}{{ m.role }}: {{ m.content }}{{ '\\n' }}{% endfor %}assistant: {% if thinking == 'begun' -%}
<think>{{ '\\n' }}{% elif thinking == 'off' %}<think>{{ '\\n\\n' }}</think>{{ '\\n\\n' }}{% endif %}"""
MESSAGES = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
ANSWERS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
]


@pytest.fixture(scope="module", params=["qwen3", "deepseek_r1"])
def reasoning_server(
    tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[RunningServer]:
    """A server whose reasoning tags are text for one parser, and special tokens for the other."""
    folder = tmp_path_factory.mktemp("reasoning")
    with_byte_tokenizer(tiny_model_dir("llama", vocab_size=VOCAB_SIZE + 2, max_position_embeddings=1024), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    add = backend.add_tokens if request.param == "qwen3" else backend.add_special_tokens
    add(["<think>", "</think>"])
    backend.save(str(folder / "tokenizer.json"))
    llm = AsyncLLM(model=str(folder), num_kv_blocks=100, num_threads=1, max_num_seqs=4)
    with run_server(llm, "tiny", api=ApiOptions(reasoning_parser=request.param)) as running:
        yield running


def bias(server: RunningServer) -> dict[str, float]:
    """A bias towards `<think>`, then H until the penalty has brought it below `</think>`, then `</think>`."""
    names = {"<think>": 50, "H": 99, "</think>": 96}
    ids = {name: server.llm.engine.tokenizer.encode(name, add_special_tokens=False) for name in names}
    assert all(len(token_ids) == 1 for token_ids in ids.values())
    return {str(ids[name][0]): value for name, value in names.items()}


def reasoning_and_answer(server: RunningServer, thinking: str, answer: dict[str, Any]) -> tuple[str, str]:
    """The reasoning and the rest of an answer, which are equal with and without streaming."""
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 120,
        "logit_bias": bias(server),
        "frequency_penalty": 2,
        **answer,
        "extra_body": {"chat_template_kwargs": {"thinking": thinking}},
    }
    chat = server.client().chat.completions
    (choice,) = chat.create(**body).choices
    message = choice.message
    content = message.content or "".join(call.function.arguments for call in message.tool_calls or [])
    found = getattr(message, "reasoning_content", None) or "", content
    streamed = ["", ""]
    for chunk in chat.create(**body, stream=True):
        delta = chunk.choices[0].delta
        streamed[0] += getattr(delta, "reasoning_content", None) or ""
        streamed[1] += delta.content or ""
        streamed[1] += "".join(call.function.arguments or "" for call in delta.tool_calls or [])
    assert tuple(streamed) == found
    return found


@pytest.mark.parametrize("answer", ANSWERS, ids=["schema", "required", "named"])
def test_reasoning_is_separated_and_the_rest_follows_its_structure(
    reasoning_server: RunningServer, answer: dict[str, Any]
) -> None:
    for thinking in ("free", "begun"):
        reasoning, rest = reasoning_and_answer(reasoning_server, thinking, answer)
        assert set(reasoning) == {"H"}
        assert rest.replace(" ", "") == '{"ok":true}'


@pytest.mark.parametrize("answer", ANSWERS, ids=["schema", "required", "named"])
def test_there_is_no_reasoning_if_the_prompt_has_ended_it(
    reasoning_server: RunningServer, answer: dict[str, Any]
) -> None:
    reasoning, rest = reasoning_and_answer(reasoning_server, "off", answer)
    assert (reasoning, rest.replace(" ", "")) == ("", '{"ok":true}')


def test_reasoning_may_use_all_tokens(reasoning_server: RunningServer) -> None:
    fields = {"chat_template_kwargs": {"thinking": "begun"}, "temperature": 0, "max_tokens": 3, **ANSWERS[0]}
    choice = reasoning_server.post("/v1/chat/completions", {"messages": MESSAGES, **fields}).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert choice["message"]["reasoning_content"]


BUDGET = 7


@pytest.mark.parametrize(
    "answer", [{}, {"tools": [WEATHER]}, *ANSWERS], ids=["text", "tools", "schema", "required", "named"]
)
@pytest.mark.parametrize("thinking", ["free", "begun"])
def test_reasoning_ends_at_its_budget(reasoning_server: RunningServer, thinking: str, answer: dict[str, Any]) -> None:
    body = {
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 60,
        "logit_bias": {token: value for token, value in bias(reasoning_server).items() if value == 99},
        "chat_template_kwargs": {"thinking": thinking},
        **answer,
    }
    chat = reasoning_server.post("/v1/chat/completions", {**body, "thinking_token_budget": BUDGET})
    assert chat.status_code == 200, chat.text
    assert "x-chairlift-ignored" not in chat.headers
    message = chat.json()["choices"][0]["message"]
    assert message["reasoning_content"] == "H" * BUDGET
    rest = message["content"] or "".join(call["function"]["arguments"] for call in message["tool_calls"])
    if answer in ANSWERS:
        assert rest.replace(" ", "") == '{"ok":true}'
    else:
        assert len(rest) > BUDGET
        assert set(rest) == {"H"}


@pytest.mark.parametrize("answer", [{}, ANSWERS[0]], ids=["text", "schema"])
@pytest.mark.parametrize("thinking", ["free", "begun"])
def test_a_budget_of_0_prevents_reasoning(
    reasoning_server: RunningServer, thinking: str, answer: dict[str, Any]
) -> None:
    fields = {"chat_template_kwargs": {"thinking": thinking}, "thinking_token_budget": 0, "temperature": 0, **answer}
    chat = reasoning_server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 60, **fields})
    assert "x-chairlift-ignored" not in chat.headers
    message = chat.json()["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"]


def test_the_budget_of_claude_limits_reasoning(reasoning_server: RunningServer) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 40,
        "thinking": {"type": "enabled", "budget_tokens": BUDGET},
        "top_k": 1,
    }
    for stream in (False, True):
        answer = reasoning_server.post("/v1/messages", {**body, "stream": stream})
        assert answer.status_code == 200
        assert "x-chairlift-ignored" not in answer.headers
    thought, _text = reasoning_server.post("/v1/messages", body).json()["content"]
    assert thought["type"] == "thinking"
    tokens = reasoning_server.llm.engine.tokenizer.encode(thought["thinking"], add_special_tokens=False)
    assert 0 < len(tokens) <= BUDGET


def test_a_budget_without_reasoning_is_named(reasoning_server: RunningServer) -> None:
    fields = {"chat_template_kwargs": {"thinking": "off"}, "thinking_token_budget": 1}
    answer = reasoning_server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, **fields})
    assert answer.headers["x-chairlift-ignored"] == "thinking_token_budget"
    planned = planner("chatml").plan(
        MessagesRequest.model_validate(
            {"messages": MESSAGES, "max_tokens": 3, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        )
    )
    assert planned.ignored == ("thinking_token_budget",)
    assert planned.params.structured_outputs is None
    assert MessagesRequest.own_names[planned.ignored[0]] == "thinking.budget_tokens"


def test_an_answer_that_goes_on_with_the_last_message_does_not_reason_by_a_budget() -> None:
    body = {
        "messages": [*MESSAGES, {"role": "assistant", "content": "{"}],
        "max_tokens": 3,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    planned = planner("qwen3").plan(MessagesRequest.model_validate(body))
    assert planned.ignored == ("thinking_token_budget",)
    assert planned.params.structured_outputs is None
