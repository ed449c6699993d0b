"""The options of LoRA adapters on the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chairlift.errors import ConfigError
from chairlift.options import parse_paths


def test_adapters_are_named_on_the_command_line() -> None:
    assert parse_paths(["a=one", "b=/x/y=z"], "lora_modules") == {"a": "one", "b": "/x/y=z"}
    assert parse_paths(['{"name": "a", "path": "one"}', "b=two"], "lora_modules") == {"a": "one", "b": "two"}
    listed = [{"name": "a", "path": "one", "base_model_name": "m"}, {"name": "b", "path": "two"}]
    for items in (listed, json.dumps(listed), [json.dumps(listed)], [json.dumps(each) for each in listed]):
        assert parse_paths(items, "lora_modules") == {"a": "one", "b": "two"}
    assert parse_paths([], "lora_modules") is None


@pytest.mark.parametrize(
    "items",
    [
        ["a"],
        ["=x"],
        ["a="],
        ["a=x", "a=y"],
        [5],
        [["a=x"]],
        [{"name": "a", "path": 5}],
        [{"name": 5, "path": "x"}],
        [{"name": "a", "path": "x", "rank": 8}],
    ],
)
def test_other_forms_are_errors(items: list[Any]) -> None:
    with pytest.raises(ConfigError, match="lora_modules must be name=path with distinct names, got"):
        parse_paths(items, "lora_modules")
