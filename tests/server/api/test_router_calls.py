"""The calls of vllm-router 0.1.17 and sglang-router 0.3.2, with the bodies that they send."""

from __future__ import annotations

from typing import Any

import httpx

from support.case_loop import loop_over
from support.running_server import RunningServer

USER = {"role": "user", "content": "hi"}
ADDED = {"no_stop_trim": False, "return_hidden_states": False}
ADDED_TO_CHATS = {**ADDED, "separate_reasoning": True, "stream_reasoning": True}
ALL_NAMES = "no_stop_trim, return_hidden_states, separate_reasoning, stream_reasoning"
COMPLETION = {"prompt": "hi", "max_tokens": 4, "echo": False, "ignore_eos": False, "skip_special_tokens": True, **ADDED}
CHAT = {"messages": [USER], "max_completion_tokens": 4, "logprobs": False, "continue_final_message": False}
CHAT |= {"ignore_eos": False, "skip_special_tokens": True, **ADDED_TO_CHATS}
RESPONSE = {"input": "hi", "max_output_tokens": 4, "store": True, "stream": None, "temperature": 1.0, "top_p": 1.0}
RESPONSE |= {"priority": 0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
CALLS: list[tuple[str, dict[str, Any], str | None]] = [
    ("/v1/completions", COMPLETION, "no_stop_trim, return_hidden_states"),
    ("/v1/chat/completions", CHAT, ALL_NAMES),
    ("/v1/chat/completions", {**CHAT, "include_reasoning": True}, ALL_NAMES),
    ("/v1/responses", RESPONSE, None),
]
MORE_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["one", "two three"], "max_tokens": 3}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 3}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 90_000}),
    ("/v1/chat/completions", {"messages": [USER]}),
]


@loop_over("stream", [False, True])
@loop_over(("path", "body", "names"), CALLS)
def test_fields_that_routers_add_are_named(
    api_server: RunningServer, path: str, body: dict[str, Any], names: str | None, stream: bool
) -> None:
    answer = api_server.post(path, {**body, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-chairlift-ignored") == names


@loop_over(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_values_that_would_change_the_answer_are_rejected(
    api_server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    for name in ADDED_TO_CHATS.keys() & body.keys():
        answer = api_server.post(path, {**body, name: not body[name]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name
        assert f"{name} must be {str(body[name]).lower()}, got " in answer.json()["error"]["message"]


def test_routers_send_null_for_names_of_other_servers(api_server: RunningServer) -> None:
    body = {"query": "a", "documents": ["b"], "return_documents": True, "user": None}
    for name, used in (("rid", "request_id"), ("top_k", "top_n")):
        accepted = api_server.post("/v1/rerank", {**body, name: None}).json()["error"]
        assert "the model generates text" in accepted["message"]
        rejected = api_server.post("/v1/rerank", {**body, name: 3}).json()["error"]
        assert (rejected["param"], used in rejected["message"]) == (name, True)


@loop_over(("path", "body"), [(path, body) for path, body, _names in CALLS] + MORE_BODIES)
def test_a_rendered_prompt_is_the_one_that_is_computed(
    api_server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    rendered = api_server.post(f"{path}/render", body)
    assert rendered.status_code == 200, rendered.text
    prompts = rendered.json() if path == "/v1/completions" else [rendered.json()]
    limits = [name for name in body if name.startswith("max_")]
    answer = api_server.post(path, {**body, "temperature": 0, **dict.fromkeys(limits, 2)}).json()
    usage, given = answer["usage"], min((body[name] for name in limits), default=1 << 20)
    num_tokens = usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert sum(len(prompt["token_ids"]) for prompt in prompts) == num_tokens
    length = httpx.get(f"{api_server.url}/server_info").json()["context_length"]
    for prompt in prompts:
        assert prompt["sampling_params"]["max_tokens"] == min(given, length - len(prompt["token_ids"]))


def test_rendered_tokens_are_those_of_tokenize(api_server: RunningServer) -> None:
    chat = api_server.post("/v1/chat/completions/render", {**CHAT, "stream": True, "cache_salt": "s"}).json()
    assert chat["token_ids"] == api_server.post("/tokenize", {"messages": [USER]}).json()["tokens"]
    assert (chat["stream"], chat["cache_salt"], chat["priority"]) == (True, "s", 0)
    completion = api_server.post("/v1/completions/render", {"prompt": ["a", "b"], "seed": 5}).json()
    tokens = [api_server.post("/tokenize", {"prompt": text}).json()["tokens"] for text in ("a", "b")]
    assert [prompt["token_ids"] for prompt in completion] == tokens
    assert {prompt["sampling_params"]["seed"] for prompt in completion} == {5}


@loop_over(("path", "body", "param"), [
    ("/v1/completions", {"prompt": "x" * 30_000}, "prompt"),
    ("/v1/chat/completions", {"messages": [USER], "n": 0}, "n"),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
])  # fmt: skip
def test_an_invalid_call_is_not_rendered(
    api_server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    rendered, answer = (api_server.post(each, body) for each in (f"{path}/render", path))
    assert rendered.status_code == answer.status_code == 400
    assert rendered.json() == answer.json()
    assert rendered.json()["error"]["param"] == param


def test_the_server_and_its_model_are_described(api_server: RunningServer) -> None:
    (card,) = httpx.get(f"{api_server.url}/v1/models").json()["data"]
    server, model = (httpx.get(f"{api_server.url}/{name}_info").json() for name in ("server", "model"))
    assert (server["served_model_name"], server["context_length"]) == (card["id"], card["max_model_len"])
    assert server["model_path"] == model["model_path"] == model["tokenizer_path"] == card["root"]
    assert (model["is_generation"], model["model_type"]) == (True, "llama")
    for name in ("server", "model"):
        assert httpx.get(f"{api_server.url}/{name}_info", params={"model": "other"}).status_code == 404
