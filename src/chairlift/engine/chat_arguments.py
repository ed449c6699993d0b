"""Checks the arguments of a chat without a server: the messages, and the variables of the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chairlift.errors import RequestError
from chairlift.loading.text.chat_template import RESERVED_VARIABLES, TextParts


def template_kwargs(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """`chat_template_kwargs` of a call; raises RequestError if it contains a name that is `given` as an argument."""
    if not isinstance(value, Mapping | None) or not all(isinstance(name, str) for name in value or ()):
        problem = f"must map names as in {{'enable_thinking': False}}, got {value!r:.100}"
        raise RequestError(f"chat_template_kwargs {problem}", "chat_template_kwargs")
    if wrong := [name for name in value or () if name in RESERVED_VARIABLES or name in given]:
        problem = f"must not contain {', '.join(sorted(wrong))}: use only the arguments of chat with these names"
        raise RequestError(f"chat_template_kwargs {problem}", "chat_template_kwargs")
    return value or {}


def with_joined_parts(message: dict[str, Any], index: int) -> dict[str, Any]:
    """The message with the texts of its parts as its content. Raises RequestError if a part is no text."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list):
        return message
    for number, part in enumerate(parts):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            form = '{"type": "text", "text": TEXT}'
            raise RequestError(f"messages[{index}].content[{number}] must be {form}, got {part!r:.100}", "messages")
    return {**message, "content": TextParts(part["text"] for part in parts)}
