"""The registry of tool call formats: `--tool-call-parser`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chairlift.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes tool calls.

    Attributes:
        openings: texts that begin one or several calls.
        closing: text that ends them; None: they end with the answer.
        is_bare: an answer that starts with a brace or bracket starts with a call, without an opening.
        names_first: `name{...}` is a call, beside `{"name": ..., "arguments": {...}}`.
        id_length: of the ids that its chat template accepts; None: any.
    """

    openings: tuple[str, ...]
    closing: str | None = None
    is_bare: bool = False
    names_first: bool = False
    id_length: int | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        return self.openings if self.closing is None else (*self.openings, self.closing)


TOOL_CALL_FORMATS: Final[dict[str, CallFormat]] = {
    "hermes": CallFormat(openings=("<tool_call>",), closing="</tool_call>"),
    "llama3_json": CallFormat(openings=("<|python_tag|>",), is_bare=True),
    "mistral": CallFormat(openings=("[TOOL_CALLS]",), names_first=True, id_length=9),
}
"""hermes: Hermes 2 and 3, Qwen 2.5 and 3, SmolLM2. llama3_json: Llama 3.1 to 3.3. mistral: all of Mistral's forms."""

FORCED_CALLS: Final = CallFormat(openings=(), is_bare=True)
"""What an answer looks like that is constrained to calls."""


def tool_call_format(name: str, chat_template: str | None) -> CallFormat:
    """The format of that name; `auto` goes by what the model's chat template writes.

    Raises:
        ConfigError: there is none.
    """
    if name == "auto":
        name = _told_by(chat_template or "")
    if name not in TOOL_CALL_FORMATS:
        raise ConfigError(f"tool_call_parser={name!r}: there are auto, {', '.join(TOOL_CALL_FORMATS)}")
    return TOOL_CALL_FORMATS[name]


def _told_by(chat_template: str) -> str:
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    return "llama3_json" if "<|python_tag|>" in chat_template or "ipython" in chat_template else "hermes"
