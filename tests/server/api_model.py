"""A tiny model that supports all features of the API, and checks of responses against the types of the clients."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from openai import BaseModel as OpenAIModel

from support.byte_tokenizer import write_byte_tokenizer

CHAT_TEMPLATE: Final = """\
{%- if tools %}{{ 'tools: ' + (tools | tojson) + '\\n' }}{% endif %}
{%- if documents %}{{ 'documents: ' + (documents | tojson) + '\\n' }}{% endif %}
{%- if reasoning_effort %}{{ 'effort: ' + reasoning_effort + '\\n' }}{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}assistant: {% if enable_thinking %}{{ '<think>\\n' -}}
{% elif enable_thinking is false %}{{ '<think></think>' }}{% endif %}{% endif %}"""

NO_THOUGHTS: Final = {"chat_template_kwargs": {"enable_thinking": False}}
"""Disables reasoning for structured outputs. Otherwise the random model generates reasoning up to the limit."""


EXTENSIONS: Final = {
    "default_sampling_params",
    "stop_reason",
    "prompt_logprobs",
    "prompt_token_ids",
    "token_ids",
    "reasoning_content",
    "timings",
    "cache_miss",
    "disk_tokens",
}
"""Fields of vLLM and Chairlift that the types of the clients do not have."""


def with_api_tokenizer(model_dir: Path, folder: Path) -> Path:
    """Copy a tiny model, and add a byte tokenizer and a template that reads every variable."""
    shutil.copytree(model_dir, folder, dirs_exist_ok=True)
    write_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def check_type(kind: type[Any], value: dict[str, Any]) -> None:
    """Assert that the type of the client accepts the value, and declares all of its fields."""
    model = kind.model_validate(value)
    for path, name in _unknown(model, kind.__name__):
        assert name in EXTENSIONS, f"{path} has no field {name}"


def _unknown(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, list):
        for entry in value:
            yield from _unknown(entry, path)
    elif hasattr(value, "model_extra"):
        yield from ((path, name) for name in value.model_extra or {})
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name, None), f"{path}.{name}")


def raw(answer: OpenAIModel) -> dict[str, Any]:
    """The response as it was received."""
    return answer.to_dict(mode="python")
