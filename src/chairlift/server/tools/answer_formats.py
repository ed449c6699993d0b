"""The delimiters of tool calls and reasoning, which `--tool-call-parser` and `--reasoning-parser` select."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from chairlift.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes tool calls.

    Attributes:
        openings: texts that begin one or several calls.
        closing: the text that ends them; None if they end with the answer.
        is_bare: a brace or bracket at the start of an answer begins a call, without an opening.
        names_first: `name{...}` is a call too, besides `{"name": ..., "arguments": {...}}`.
        is_pythonic: `name(key=value, ...)` is a call too.
        is_gemma: `call:name{key:value,...}` is a call; see `GemmaCallScanner`.
        is_list: calls are a list after one opening; otherwise each call has an opening.
        is_harmony: answers consist of messages in channels; see `HarmonyParser`.
        key: the key of the arguments in a call that is JSON.
        id_length: the length of call ids that the chat template accepts; None for any length.
    """

    openings: tuple[str, ...]
    closing: str | None = None
    is_bare: bool = False
    names_first: bool = False
    is_pythonic: bool = False
    is_gemma: bool = False
    is_list: bool = False
    is_harmony: bool = False
    key: str = "arguments"
    id_length: int | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """The openings and the closing."""
        return self.openings if self.closing is None else (*self.openings, self.closing)


TOOL_CALL_FORMATS: Final[dict[str, CallFormat]] = {
    "hermes": CallFormat(openings=("<tool_call>",), closing="</tool_call>"),
    "llama3_json": CallFormat(openings=("<|python_tag|>",), is_bare=True, key="parameters"),
    "mistral": CallFormat(openings=("[TOOL_CALLS]",), names_first=True, is_list=True, id_length=9),
    "granite": CallFormat(openings=("<|tool_call|>", "<tool_call>"), is_bare=True, is_list=True),
    "phi4_mini_json": CallFormat(openings=("<|tool_call|>", "functools["), closing="<|/tool_call|>", is_list=True),
    "olmo3": CallFormat(openings=("<function_calls>",), closing="</function_calls>", is_pythonic=True),
    "gemma4": CallFormat(openings=("<|tool_call>",), closing="<tool_call|>", is_gemma=True),
    "openai": CallFormat(openings=("<|channel|>",), is_harmony=True),
    "pythonic": CallFormat(openings=("```tool_code", "```json"), closing="```", is_bare=True, is_pythonic=True),
}
"""Parsers of vLLM. hermes: Hermes 2 and 3, Qwen 2.5 and 3, SmolLM2 and 3, Granite 4. llama3_json: Llama 3.1 to 3.3.
mistral: all forms of Mistral. granite: Granite 3. gemma4: Gemma 4. openai: gpt-oss. pythonic: Gemma 3 and Llama 3.2
with a list of Python calls, or with calls in a fence."""

CALL_MARKS: Final = (
    (("<|tool_call>call:",), "gemma4"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<function_calls>",), "olmo3"),
    (("<|channel|>",), "openai"),
    (("<|tool|>",), "phi4_mini_json"),
    (("functools[",), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"),
    (("[func_name1(",), "pythonic"),
    (("```tool_code",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("ipython",), "llama3_json"),
)
"""Texts that all occur in a chat template, and the parser that they select. The first entry that applies counts."""

FORCED_CALLS: Final = CallFormat(openings=(), is_bare=True)
"""The format of an answer that is constrained to a JSON list of calls."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its reasoning.

    Attributes:
        opening, closing: the tags around the reasoning.
        is_implied: answers begin with reasoning even without the opening tag.
        label: the text after the opening tag that is not part of the reasoning.
    """

    opening: str
    closing: str
    is_implied: bool = False
    label: str = ""


REASONING_FORMATS: Final[dict[str, ReasoningFormat]] = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", is_implied=True),
    "olmo3": ReasoningFormat("<think>", "</think>", is_implied=True),
    "gemma4": ReasoningFormat("<|channel>", "<channel|>", label="thought"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}
"""Parsers of vLLM. qwen3: Qwen 3, SmolLM3 and others that write both tags, or whose prompt ends with the opening.
deepseek_r1, olmo3: models that write only the closing tag. gemma4: Gemma 4. granite: Granite 3.2. mistral:
Magistral."""

REASONING_MARKS: Final = (
    (("</think>", "<\N{FULLWIDTH VERTICAL LINE}Assistant\N{FULLWIDTH VERTICAL LINE}>"), "deepseek_r1"),
    (("</think>",), "qwen3"),
    (("<|channel>", "<channel|>"), "gemma4"),
    (("[/THINK]",), "mistral"),
    (("Here is my thought process:",), "granite"),
)
"""As `CALL_MARKS`."""


def tool_call_format(name: str, chat_template: str | None) -> CallFormat:
    """The format of this name; `auto` derives it from what the chat template of the model writes.

    Raises:
        ConfigError: the name is unknown.
    """
    if name == "auto":
        name = _name_from_template(CALL_MARKS, chat_template) or "hermes"
    if name not in TOOL_CALL_FORMATS:
        raise ConfigError(f"tool_call_parser must be one of auto, {', '.join(TOOL_CALL_FORMATS)}; got {name!r}")
    return TOOL_CALL_FORMATS[name]


def reasoning_format(name: str, chat_template: str | None) -> ReasoningFormat | None:
    """The format of this name; `auto` derives it from the tags in the chat template of the model, `none` is None.

    Raises:
        ConfigError: the name is unknown.
    """
    if name == "auto":
        name = _name_from_template(REASONING_MARKS, chat_template) or "none"
    if name == "none":
        return None
    if name not in REASONING_FORMATS:
        raise ConfigError(f"reasoning_parser must be one of auto, none, {', '.join(REASONING_FORMATS)}; got {name!r}")
    return REASONING_FORMATS[name]


def _name_from_template(marks: Iterable[tuple[tuple[str, ...], str]], chat_template: str | None) -> str | None:
    return next((name for texts, name in marks if all(text in (chat_template or "") for text in texts)), None)
