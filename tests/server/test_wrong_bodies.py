"""Bodies with many mistakes in them: one is enough to refuse them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from chairlift.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
)

MANY = 1000
CHAT = {"messages": [{"role": "user", "content": "x"}]}
WRONG: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (CompletionRequest, {"prompt": [None] * MANY}),
    (CompletionRequest, {"prompt": [[None] * MANY]}),
    (CompletionRequest, {"prompt": "x", "stop": [1] * MANY}),
    (CompletionRequest, {"prompt": "x", "logit_bias": {str(n): "x" for n in range(2000)}}),
    (CompletionRequest, {"prompt": "x", **{f"unknown{n}": 1 for n in range(MANY)}}),
    (ChatCompletionRequest, {"messages": [1] * MANY}),
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}),
    (ChatCompletionRequest, {"messages": [{"role": "user", **{f"unknown{n}": 1 for n in range(MANY)}}]}),
    (ChatCompletionRequest, {**CHAT, "tools": [1] * MANY}),
    (MessagesRequest, {"model": "m", "max_tokens": 1, "messages": [1] * MANY}),
    (ResponsesRequest, {"input": [1] * MANY}),
    (TokenizeRequest, {"messages": [1] * MANY}),
    (DetokenizeRequest, {"tokens": ["x"] * MANY}),
]


@pytest.mark.parametrize(("kind", "body"), WRONG)
def test_the_number_of_errors_does_not_grow_with_the_body(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 40


def test_right_ones_are_as_long_as_they_like() -> None:
    assert CompletionRequest(prompt=[1] * MANY).prompt == [1] * MANY
    assert CompletionRequest(prompt=["x"] * MANY).prompt == ["x"] * MANY
    assert CompletionRequest(prompt=[[1, 2]] * MANY).prompt == [[1, 2]] * MANY
    assert len(CompletionRequest(prompt="x", logit_bias={str(n): 1.0 for n in range(1024)}).logit_bias or ()) == 1024
