"""null is the default of every optional field of every body, and required fields stay required."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from chairlift.server.api.models import AdapterLoad, AdapterUnload, ModelSwitch
from chairlift.server.api.routes import ENDPOINTS
from chairlift.server.protocol.base import RequestBody
from chairlift.server.web.page_bodies import BurstBody
from support.case_loop import loop_over
from support.running_server import RunningServer

ADMIN_BODIES = [AdapterLoad, AdapterUnload, ModelSwitch, BurstBody]
USER = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x", "is_error": None, "cache_control": None}
MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2, "ignore_eos": True},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 2, "ignore_eos": True},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2, "ignore_eos": True},
    "/v1/messages": {"messages": [USER], "max_tokens": 2, "ignore_eos": True},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [10]},
}


def body_types(kind: type[RequestBody] = RequestBody) -> Iterator[type[RequestBody]]:
    for derived in kind.__subclasses__():
        yield derived
        yield from body_types(derived)


def names(kind: type[RequestBody], *, is_required: bool) -> list[tuple[str, FieldInfo]]:
    fields = kind.model_fields.items()
    return [(field.alias or name, field) for name, field in fields if field.is_required() == is_required]


def failing_fields(kind: type[RequestBody], body: dict[str, Any]) -> set[Any]:
    try:
        kind.model_validate(body)
    except ValidationError as error:
        return {problem["loc"][0] for problem in error.errors() if problem["loc"]}
    return set()


def test_all_bodies_of_endpoints_are_tried() -> None:
    types = set(body_types())
    assert types > {endpoint.body for endpoint in ENDPOINTS} | set(ADMIN_BODIES)
    assert len(types) > 60


@loop_over("kind", sorted(set(body_types()), key=lambda kind: kind.__name__))
def test_null_is_the_default_of_optional_fields_only(kind: type[RequestBody]) -> None:
    optional = names(kind, is_required=False)
    assert failing_fields(kind, {name: None for name, _ in optional}).isdisjoint(name for name, _ in optional)
    for name, field in names(kind, is_required=True):
        accepts_null = field.annotation is Any or type(None) in getattr(field.annotation, "__args__", ())
        assert (name in failing_fields(kind, {name: None})) != accepts_null
    assert "misspelled" in failing_fields(kind, {"misspelled": None}) or kind.model_config["extra"] == "allow"


@loop_over("path", MINIMAL)
def test_a_body_with_nulls_has_the_same_answer(api_server: RunningServer, path: str) -> None:
    (kind,) = (endpoint.body for endpoint in ENDPOINTS if endpoint.path == path)
    nulls = {name: None for name, _ in names(kind, is_required=False)}
    answer = api_server.post(path, {**nulls, **MINIMAL[path]})
    assert answer.status_code == 200, answer.text
    assert "x-chairlift-ignored" not in answer.headers
    assert answer.json().keys() == api_server.post(path, MINIMAL[path]).json().keys()


def test_nested_objects_accept_null(api_server: RunningServer) -> None:
    turns = [USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [RESULT]}]
    answer = api_server.post("/v1/messages", {"messages": turns, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
