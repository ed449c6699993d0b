"""The registry of tool call formats: `--tool-call-parser`."""

from __future__ import annotations

from typing import Final

from chairlift.errors import ConfigError
from chairlift.server.tools.tool_parser import CallFormat

FORMATS: Final[dict[str, CallFormat]] = {
    "hermes": CallFormat(openings=("<tool_call>",), closing="</tool_call>"),
    "llama3_json": CallFormat(openings=("<|python_tag|>",), is_bare=True),
    "mistral": CallFormat(openings=("[TOOL_CALLS]",), names_first=True, id_length=9),
}
"""hermes: Hermes 2 and 3, Qwen 2.5 and 3, SmolLM2. llama3_json: Llama 3.1 to 3.3. mistral: all of Mistral's forms."""

FORCED: Final = CallFormat(openings=(), is_bare=True)
"""What an answer looks like that is constrained to calls."""


def tool_call_format(name: str, chat_template: str | None) -> CallFormat:
    """The format of that name; `auto` goes by what the model's chat template writes.

    Raises:
        ConfigError: there is none.
    """
    if name == "auto":
        name = _told_by(chat_template or "")
    if name not in FORMATS:
        raise ConfigError(f"tool_call_parser={name!r}: there are auto, {', '.join(FORMATS)}")
    return FORMATS[name]


def _told_by(chat_template: str) -> str:
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    return "llama3_json" if "<|python_tag|>" in chat_template or "ipython" in chat_template else "hermes"
