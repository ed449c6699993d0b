"""An object of JSON with its text, so that a prompt repeats the arguments of a call as the model has written them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class WrittenObject(dict[str, Any]):
    """An object, with the text from which it was parsed. It is not changed."""

    def __init__(self, items: Mapping[str, Any], text: str) -> None:
        super().__init__(items)
        self.text = text


def json_text(value: Any, **options: Any) -> str:
    """The JSON of a value: its own text, unless the options of `json.dumps` require another one."""
    is_written = isinstance(value, WrittenObject) and not any(options.values())
    return value.text if is_written else json.dumps(value, **{"ensure_ascii": False, **options})
