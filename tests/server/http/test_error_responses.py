"""Error messages name the field, the limit and the correction."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from chairlift.errors import RequestError
from chairlift.options import FOREIGN_OPTIONS
from chairlift.server.api.endpoint import Endpoint
from chairlift.server.api.routes import ENDPOINTS
from chairlift.server.protocol.base import RequestBody
from chairlift.server.protocol.validation_errors import validation_problem
from support.running_server import RunningServer


class BodyWithLimit(RequestBody):
    @property
    def chat_field_names(self) -> dict[str, str]:
        return {"max_tokens": "limit"}


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def message(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize(
    ("method", "path", "status", "expected"),
    [
        ("POST", "/chat/completions", 404, "did you mean /v1/chat/completions? The base URL of a client ends in /v1."),
        (
            "POST",
            "/v1/v1/completions",
            404,
            "the path /v1/v1/completions does not exist: did you mean /v1/completions?",
        ),
        ("POST", "/v1/audio/speech", 404, "the path /v1/audio/speech does not exist: /openapi.json lists all paths."),
        ("GET", "/docs/v1/models", 404, "the path /docs/v1/models does not exist: did you mean /v1/models?"),
        ("GET", "/q", 404, "the path /q does not exist: /openapi.json lists all paths."),
        ("GET", "/" + "x" * 9000, 404, "x does not exist: /openapi.json lists all paths."),
        ("POST", "/api/chat", 404, "clients of Ollama can use the API of OpenAI, whose base URL ends in /v1"),
        ("GET", "/api/v1/models", 404, "the path /api/v1/models does not exist: did you mean /v1/models?"),
        ("GET", "/v1/completions", 405, "/v1/completions accepts POST, not GET"),
    ],
)
def test_the_error_of_a_wrong_path_or_method_names_the_right_one(
    api_server: RunningServer, method: str, path: str, status: int, expected: str
) -> None:
    answer = httpx.request(method, api_server.url + path)
    assert answer.status_code == status
    assert message(answer).endswith(expected)
    assert len(message(answer)) < 200


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("GET", "/v1/messages", "api_error"),
        ("POST", "/v1/messages/batches", "not_found_error"),
        ("GET", "/v1/messages/batches/a/results", "not_found_error"),
    ],
)
def test_errors_below_the_path_of_messages_have_the_form_of_anthropic(
    api_server: RunningServer, method: str, path: str, kind: str
) -> None:
    answer = httpx.request(method, api_server.url + path)
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", kind)


def test_the_list_of_models_may_end_in_a_slash(api_server: RunningServer) -> None:
    lists = [httpx.get(f"{api_server.url}/v1/models{end}").json() for end in ("", "/")]
    assert lists[0] == lists[1]


def test_a_long_model_name_is_shortened_in_the_error(api_server: RunningServer) -> None:
    name = "x" * 5000
    fields = {"messages": [{"role": "user", "content": "x"}], "model": name}
    bodies = {
        "/v1/completions": {"prompt": "x", "model": name},
        "/v1/chat/completions": fields,
        "/v1/responses": {"input": "x", "model": name},
        "/v1/messages": {**fields, "max_tokens": 1},
        "/v1/messages/count_tokens": fields,
        "/tokenize": {"prompt": "x", "model": name},
        "/detokenize": {"tokens": [1], "model": name},
    }
    answers = [api_server.post(path, body) for path, body in bodies.items()]
    answers += [httpx.get(f"{api_server.url}/v1/{kind}/{name}") for kind in ("models", "requests")]
    for answer in answers:
        assert answer.status_code == 404
        assert "'xxx" in message(answer)
        assert len(answer.content) < 500
        assert sum(len(value) for value in answer.headers.values()) < 200
    assert api_server.access_log is not None
    assert max(map(len, api_server.access_log.read_text().splitlines()[-len(answers) :])) < 1500


@pytest.mark.parametrize(
    ("fields", "param", "expected"),
    [
        ({"messages": []}, "messages", "messages must have at least 1 entry, got []"),
        ({"request_id": ""}, "request_id", "request_id must have at least 1 character, got ''"),
        ({"request_id": "x" * 200}, "request_id", "request_id must have at most 128 characters, got 'xxx"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be between 0 and 20, got 21"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "top_logprobs must be between 0 and 20, got -1"),
        ({"store": "yes"}, "store", "store must be true or false, got 'yes'"),
        ({"max_completion_token": 3}, "max_completion_token", "max_completion_token is unknown: did you mean max_c"),
        ({"temperatur": 0}, "temperatur", "temperatur is unknown: did you mean temperature?"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
            "tools",
            "tools[0].function.paramters is unknown: did you mean parameters?",
        ),
        ({"x" * 5000: 1}, "x" * 100 + "...", "x" * 100 + "... is unknown or not supported: leave it out"),
        ({"messages": None}, "messages", "messages must be a list, got null"),
        ({"stop": {"é": [True, None]}}, "stop", 'stop must be a string or a list, got {"é": [true, null]}'),
        ({"audio": {}}, "audio", "audio is not supported: leave it out"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be at"),
    ],
)
def test_the_error_of_a_wrong_value_names_the_field_and_the_limit(
    api_server: RunningServer, fields: dict[str, Any], param: str, expected: str
) -> None:
    answer = api_server.post("/v1/chat/completions", {**CHAT, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert message(answer).startswith(expected)


@pytest.mark.parametrize(
    ("path", "field", "expected"),
    [
        ("chat/completions", "guided_json", "use structured_outputs"),
        ("chat/completions", "enable_thinking", "use chat_template_kwargs"),
        ("chat/completions", "max_output_tokens", "use max_tokens"),
        ("completions", "guided_regex", "use structured_outputs"),
        ("responses", "messages", "did you mean input?"),
        ("responses", "response_format", "did you mean text?"),
        ("responses", "n_predict", "use max_output_tokens"),
        ("responses", "format", "use text"),
        ("messages", "format", "use output_config"),
        ("messages", "stop", "did you mean stop_sequences?"),
    ],
)
def test_the_error_of_a_field_of_another_api_names_the_right_one(
    api_server: RunningServer, path: str, field: str, expected: str
) -> None:
    fields = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}.get(path, CHAT)
    answer = api_server.post(f"/v1/{path}", {**fields, field: {}})
    assert (answer.status_code, message(answer)) == (400, f"{field} is unknown: {expected}")


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_advice_names_only_fields_of_the_endpoint(endpoint: Endpoint[Any]) -> None:
    fields, named = endpoint.body.model_fields, []
    for name in (FOREIGN_OPTIONS.keys() | endpoint.body.own_names.keys()) - fields.keys():
        problem: Any = {"type": "extra_forbidden", "loc": (name,), "input": {}, "msg": ""}
        text, _field = validation_problem(endpoint.body, [problem], {name: {}})
        named += re.findall(r": (?:use|did you mean) (\w+)", text)
    assert set(named) <= fields.keys()


def test_errors_name_a_limit_as_the_request_does(api_server: RunningServer) -> None:
    answer = api_server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 0})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_output_tokens"
    assert message(answer).startswith("max_output_tokens must be at least 1, got 0")
    assert "max_tokens" not in message(answer)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": CHAT["messages"], "max_completion_tokens": 2}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
    ],
)
def test_errors_quote_the_request_unchanged(api_server: RunningServer, path: str, fields: dict[str, Any]) -> None:
    outputs = {"regex": "max_tokens=[0-9"}
    answer = api_server.post(path, {**fields, "structured_outputs": outputs})
    assert answer.status_code == 400
    assert outputs["regex"] in message(answer)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RequestError("min_tokens must be at most max_tokens=3, got 4", "min_tokens"),
            "min_tokens must be at most limit=3",
        ),
        (
            RequestError("max_tokens=9 is too large. Lower max_tokens.", "max_tokens"),
            "limit=9 is too large. Lower limit.",
        ),
        (RequestError("tools: 'max_tokens' is strict", "tools"), "tools: 'max_tokens' is strict"),
    ],
)
def test_only_errors_of_limits_are_renamed(error: RequestError, expected: str) -> None:
    with pytest.raises(RequestError, match=f"^{expected}") as raised, BodyWithLimit().errors_with_own_names():
        raise error
    assert raised.value.param == ("limit" if error.param == "max_tokens" else error.param)
