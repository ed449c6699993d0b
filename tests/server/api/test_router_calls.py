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
CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", COMPLETION, "no_stop_trim, return_hidden_states"),
    ("/v1/chat/completions", CHAT, ALL_NAMES),
    ("/v1/chat/completions", {**CHAT, "include_reasoning": True}, ALL_NAMES),
    ("/v1/responses", RESPONSE, "store"),
]


@loop_over("stream", [False, True])
@loop_over(("path", "body", "names"), CALLS)
def test_fields_that_routers_add_are_named(
    api_server: RunningServer, path: str, body: dict[str, Any], names: str, stream: bool
) -> None:
    answer = api_server.post(path, {**body, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-chairlift-ignored"] == names


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


def test_the_server_and_its_model_are_described(api_server: RunningServer) -> None:
    (card,) = httpx.get(f"{api_server.url}/v1/models").json()["data"]
    server, model = (httpx.get(f"{api_server.url}/{name}_info").json() for name in ("server", "model"))
    assert (server["served_model_name"], server["context_length"]) == (card["id"], card["max_model_len"])
    assert server["model_path"] == model["model_path"] == model["tokenizer_path"] == card["root"]
    assert (model["is_generation"], model["model_type"]) == (True, "llama")
    for name in ("server", "model"):
        assert httpx.get(f"{api_server.url}/{name}_info", params={"model": "other"}).status_code == 404
