"""The API with the official client of OpenAI."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from chairlift.version import __version__
from support.running_server import MODEL, RunningServer

PARIS = "The capital of France is"
QUESTION = [{"role": "user", "content": "Reply with one word: what is the capital of France?"}]


def complete(server: RunningServer, **fields: Any) -> openai.types.Completion:
    return server.client().completions.create(**{"model": MODEL, "prompt": PARIS, "temperature": 0, **fields})


def chat(server: RunningServer, **fields: Any) -> openai.types.chat.ChatCompletion:
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 40, **fields}
    return server.client().chat.completions.create(**body)


def test_completion_with_usage(server: RunningServer) -> None:
    answer = complete(server, max_tokens=8)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    assert answer._request_id == answer.id
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)


def test_streamed_completion_adds_up_to_the_whole(server: RunningServer) -> None:
    whole = complete(server, max_tokens=12)
    with server.hold_steps() as gate:
        gate.allow(2)
        stream = server.client().completions.create(
            model=MODEL, prompt=PARIS, temperature=0, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
        first = next(stream)
    assert first.choices[0].text, "it is sent long before the end"
    chunks = [first, *stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12


def test_the_role_is_sent_together_with_the_first_output(server: RunningServer) -> None:
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 8, "stream": True, "n": 2}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        first = next(response.iter_raw())
    chunks = [json.loads(line[6:]) for line in first.decode().splitlines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta["role"] for delta in deltas[:2]] == ["assistant"] * 2
    assert deltas[2]["content"]


def test_prompts_as_tokens_and_several_at_once_with_n(server: RunningServer) -> None:
    tokens = server.llm.engine.tokenizer.encode(PARIS)
    as_text = complete(server, max_tokens=6).choices[0].text
    assert complete(server, prompt=tokens, max_tokens=6).choices[0].text == as_text
    answer = complete(server, prompt=[tokens, tokens[:2]], max_tokens=6, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices][:2] == [as_text, as_text]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 24)


def test_completion_logprobs(server: RunningServer) -> None:
    logprobs = complete(server, max_tokens=4, logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.tokens[0] == " Paris"
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs is not None
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 4
    assert logprobs.top_logprobs[0][" Paris"] == logprobs.token_logprobs[0]


def test_prompt_logprobs_in_vllms_form(server: RunningServer) -> None:
    body = {"prompt": PARIS, "max_tokens": 1, "prompt_logprobs": 1, "temperature": 0}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == 5
    assert all(
        {"logprob", "rank", "decoded_token"} == set(next(iter(p.values()))) for p in choice["prompt_logprobs"][1:]
    )


INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", r"temperature must be in \[0, 100\], got -1"),
    ({"temperature": "hot"}, "temperature", "must be a number, got 'hot'"),
    ({"top_p": -0.5}, "top_p", r"top_p must be in \[0, 1\], got -0.5"),
    ({"n": 0}, "n", "n must be between 1 and 128, got 0"),
    ({"stop": [1, 2]}, "stop", "stop.*must be a string, got"),
    ({"stop": ""}, "stop", "empty string"),
    ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
    ({"prompt": []}, "prompt", "empty list"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": [1, 999_999]}, "prompt", r"49151"),
    ({"prompt": ["fine", "word " * 9000]}, "prompt", r"prompt\[1\] has \d+ tokens, but at most 3199 fit"),
    ({"prompt": "word " * 9000}, "prompt", r"prompt has \d+ tokens, but at most 3199 fit"),
    ({"prompt": {"a": 1}}, "prompt", "prompt"),
    ({"best_of": 0}, "best_of", "best_of must be greater than or equal to 1, got 0"),
    ({"frobnicate": 3}, "frobnicate", "unknown or not supported"),
    ({"priority": 3}, "priority", "has no effect"),
    ({"slo": {}}, "slo", "slo must have ttft_ms, tpot_ms or both"),
    ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms", "above 0 and at most 86400000, got 0"),
    ({"slo": {"tpot_ms": 1e9}}, "slo.tpot_ms", "above 0 and at most 86400000, got 1000000000.0"),
    ({"prompt": ["a"] * 30, "n": 100}, "n", "at most 2048 are allowed"),
    ({"prompt": "x" * 3_000_000}, "prompt", "3000000 bytes long"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream: true"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "keys must be token ids, got 'x'"),
    ({"logprobs": 99}, "logprobs", "between 0 and 20, got 99"),
    ({"logprobs": -1}, "logprobs", "between 0 and 20, got -1"),
    ({"logprobs": -1, "stream": True}, "logprobs", "between 0 and 20, got -1"),
    ({"logprobs": -1, "echo": True}, "logprobs", "between 0 and 20, got -1"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "between 0 and 20, got -1"),
    ({"seed": 1.5}, "seed", "must be an integer, got 1.5"),
    ({"min_tokens": 20, "max_tokens": 5}, "min_tokens", "at most max_tokens=5, got 20"),
]


EXTRA_FIELDS = ("min_tokens", "best_of", "frobnicate", "priority", "prompt_logprobs", "slo")


@pytest.mark.parametrize(("fields", "param", "match"), INVALID, ids=lambda value: json.dumps(value)[:40])
def test_an_invalid_field_is_a_400_that_names_it(
    server: RunningServer, fields: dict[str, Any], param: str, match: str
) -> None:
    extra = {name: value for name, value in fields.items() if name in EXTRA_FIELDS}
    known = {name: value for name, value in fields.items() if name not in extra}
    with pytest.raises(openai.BadRequestError, match=match) as caught:
        complete(server, **{"max_tokens": 4, **known}, extra_body=extra)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools.*must match"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs must not contain messages"),
        ({"top_logprobs": 3}, "top_logprobs is only allowed with logprobs: true"),
        ({"response_format": {"type": "xml"}}, "response_format"),
    ],
)
def test_an_invalid_chat_is_a_400(server: RunningServer, fields: dict[str, Any], match: str) -> None:
    with pytest.raises(openai.BadRequestError, match=match):
        chat(server, **fields)


def test_errors_outside_of_fields_have_the_same_form(server: RunningServer) -> None:
    broken = httpx.post(
        f"{server.url}/v1/completions", content=b"{not json", headers={"content-type": "application/json"}
    )
    assert broken.status_code == 400
    assert "not valid JSON" in broken.json()["error"]["message"]
    untyped = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "a"}')
    assert untyped.status_code == 400
    assert "Content-Type: application/json" in untyped.json()["error"]["message"]
    missing = httpx.get(f"{server.url}/v1/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "invalid_request_error"
    assert server.post("/v1/completions", {"max_tokens": 3}).json()["error"]["param"] == "prompt"
    with pytest.raises(openai.NotFoundError) as caught:
        complete(server, model="another")
    assert caught.value.code == "model_not_found"


def test_cached_tokens_are_counted_once_and_with_stop_strings(server: RunningServer) -> None:
    prompt = [100 + i for i in range(70)]
    assert cached_tokens(server, prompt=prompt, n=3, max_tokens=2) == 0
    assert cached_tokens(server, prompt=prompt, max_tokens=2) == 64
    text = complete(server, prompt=prompt, max_tokens=6).choices[0].text
    assert cached_tokens(server, prompt=prompt, max_tokens=6, stop=text[-2:]) == 64
    stream = server.client().completions.create(
        model=MODEL, prompt=prompt, max_tokens=2, n=2, stream=True, stream_options={"include_usage": True}
    )
    usage = list(stream)[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (70, 4)
    assert usage.prompt_tokens_details.cached_tokens == 64


def cached_tokens(server: RunningServer, **fields: Any) -> int | None:
    usage = complete(server, **fields).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens


def test_the_bytes_of_chat_logprobs_add_up_to_the_text(server: RunningServer) -> None:
    llama = [{"role": "user", "content": "Repeat after me: 🦙🦙🦙"}]
    answer = chat(server, messages=llama, logprobs=True, top_logprobs=3, seed=3, temperature=1.5, max_tokens=40)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert {len(entry.top_logprobs) for entry in logprobs.content or []} == {3}
    data = b"".join(bytes(entry.bytes or []) for entry in logprobs.content or [])
    assert data.decode(errors="replace").removesuffix("<|im_end|>") == answer.choices[0].message.content


def test_a_wrong_method_is_a_405_with_the_allowed_methods(server: RunningServer) -> None:
    answer = httpx.get(f"{server.url}/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_health(server: RunningServer) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert [httpx.request(method, f"{server.url}/ping").json() for method in ("GET", "POST")] == [{"status": "ok"}] * 2
    assert httpx.get(f"{server.url}/version").json() == {"version": __version__}


def test_openapi_puts_each_operation_into_one_group(api_server: RunningServer) -> None:
    paths = httpx.get(f"{api_server.url}/openapi.json").json()["paths"]
    tags = {f"{method} {path}": each.get("tags", []) for path, item in paths.items() for method, each in item.items()}
    assert set(map(len, tags.values())) == {1}, tags


def test_the_examples_of_bodies_in_the_docs_are_answered(api_server: RunningServer) -> None:
    described = httpx.get(f"{api_server.url}/openapi.json").json()
    answered = set()
    for path, item in described["paths"].items():
        content = item.get("post", {}).get("requestBody", {}).get("content", {})
        name = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
        for example in described["components"]["schemas"].get(name, {}).get("examples", ()):
            response = httpx.post(f"{api_server.url}{path}", json=example, timeout=60)
            assert response.status_code == 200, (path, response.text)
            answered.add(name)
    assert answered == {"ChatCompletionRequest", "CompletionRequest", "ResponsesRequest"}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ChatCompletionResponse", {"id", "choices", "usage", "timings"}),
        ("CompletionResponseChoice", {"index", "text", "logprobs", "token_ids"}),
        ("MessagesResponse", {"content", "stop_reason", "usage"}),
        ("ResponseObject", {"output", "status", "incomplete_details"}),
    ],
)
def test_openapi_describes_the_fields_of_responses(api_server: RunningServer, name: str, fields: set[str]) -> None:
    schemas = httpx.get(f"{api_server.url}/openapi.json").json()["components"]["schemas"]
    assert fields <= schemas[name]["properties"].keys()
