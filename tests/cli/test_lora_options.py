"""The options of LoRA adapters on the command line."""

from __future__ import annotations

import pytest

from chairlift.cli.engine_options import parse_lora_modules
from chairlift.errors import ConfigError


def test_adapters_are_named_on_the_command_line() -> None:
    assert parse_lora_modules(["a=one", "b=/x/y=z"]) == {"a": "one", "b": "/x/y=z"}
    assert parse_lora_modules([]) is None


@pytest.mark.parametrize("items", [["a"], ["=x"], ["a="], ["a=x", "a=y"]])
def test_other_forms_are_errors(items: list[str]) -> None:
    with pytest.raises(ConfigError, match="lora_modules must be name=path with distinct names, got"):
        parse_lora_modules(items)
