"""The options of LoRA adapters on the command line."""

from __future__ import annotations

import pytest

from chairlift.errors import ConfigError
from chairlift.options import parse_paths


def test_adapters_are_named_on_the_command_line() -> None:
    assert parse_paths(["a=one", "b=/x/y=z"], "lora_modules") == {"a": "one", "b": "/x/y=z"}
    assert parse_paths(['{"name": "a", "path": "one"}', "b=two"], "lora_modules") == {"a": "one", "b": "two"}
    assert parse_paths([], "lora_modules") is None


@pytest.mark.parametrize("items", [["a"], ["=x"], ["a="], ["a=x", "a=y"]])
def test_other_forms_are_errors(items: list[str]) -> None:
    with pytest.raises(ConfigError, match="lora_modules must be name=path with distinct names, got"):
        parse_paths(items, "lora_modules")
