"""ChatTemplate: the Jinja2 program of a model that renders messages to a prompt.

Templates run in a sandbox without access to files, the environment or other objects of the process; see
`template_sandbox` for its limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Final

import jinja2
from jinja2 import meta

from chairlift.errors import RequestError
from chairlift.loading.text.marked_text import MarkedText, template_text
from chairlift.loading.text.template_sandbox import TemplateEnvironment
from chairlift.loading.text.written_object import WrittenObject

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles that are template text, because some templates build special tokens from them, such as `<|user|>`."""

RESERVED_VARIABLES: Final = ("messages", "self", "add_generation_prompt", "tools", "documents", "reasoning_effort")
"""Variables of a chat template that `chat_template_kwargs` must not set."""


class ChatTemplate:
    """A chat template, which is compiled when it is first used.

    Args:
        text: the source of the template, or the sources of named templates: `tool_use` renders conversations with
            tools, as in transformers, and `default`, or else the first one, all others.
        special_tokens: the special tokens by their variable names (`bos_token`, `eos_token`, ...).

    Attributes:
        text: the sources of both.
    """

    def __init__(self, text: str | Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        named = {"default": text} if isinstance(text, str) else text
        self._default = named.get("default", next(iter(named.values()), ""))
        self._with_tools = named.get("tool_use", self._default)
        self.text = "".join(dict.fromkeys((self._default, self._with_tools)))
        self._special_tokens = {name: template_text(token) for name, token in special_tokens.items()}

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the template reads; empty if it cannot be compiled."""
        try:
            return frozenset(meta.find_undeclared_variables(TemplateEnvironment().parse(self.text)))
        except (jinja2.TemplateError, RecursionError):
            return frozenset()

    def check_variables(self, names: Iterable[str], field: str = "") -> None:
        """Raise RequestError if the template does not read one of these variables.

        Args:
            field: the field of the request that has them, besides `documents`; "" if each is a separate field.
        """
        for name in sorted(set(names) - self.variables):
            param = name if name == "documents" else field or name
            close = get_close_matches(name, self.variables, 1)
            advice = f"did you mean {close[0]}?" if close else "leave it out"
            problem = f"the chat template of this model does not read {name!r}, so it would have no effect"
            raise RequestError(f"{param}: {problem}: {advice}", param)

    @cached_property
    def _compiled(self) -> list[jinja2.Template]:
        """The templates of conversations without and with tools."""
        return [TemplateEnvironment().from_string(text) for text in (self._default, self._with_tools)]

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> MarkedText:
        """Render the prompt, with each character marked as template text or content.

        Every string of the arguments is content, except the roles of messages and marked template text.

        Args:
            messages: messages in OpenAI's format, of plain JSON values.
            add_generation_prompt: whether the prompt ends with the start of the assistant's turn.
            extra: further variables (`tools`, `documents`, ...).

        Raises:
            RequestError: the template cannot be compiled, or rejects the messages or fails on them, or a value is not
                one of JSON.
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, **extra}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            marked = _marked_copy(variables)
        except (TypeError, RecursionError) as error:
            raise RequestError(f"messages: must contain only JSON values: {error}", "messages") from None
        for message in marked["messages"]:
            if isinstance(message, dict) and (role := message.get("role")) in ROLES:
                message["role"] = template_text(role)
        try:
            text = self._compiled[extra.get("tools") is not None].render(marked)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"messages: the model's chat template cannot be compiled (line {error.lineno}: {error.message}); send "
                "the rendered prompt to the completions API",
                "messages",
            ) from None
        except Exception as error:  # A template can raise any exception.
            raise RequestError(
                f"messages: the model's chat template rejects them: {_reason(error)}", "messages"
            ) from None
        assert isinstance(text, MarkedText)
        return text


def _marked_copy(value: Any) -> Any:
    """Return a copy of a JSON value whose strings are MarkedText: content, unless they have marks already.

    Raises:
        TypeError: a value is not one of JSON.
    """
    if isinstance(value, str):
        return MarkedText(value)
    if isinstance(value, Mapping):
        copied = {str(key): _marked_copy(item) for key, item in value.items()}
        return WrittenObject(copied, value.text) if isinstance(value, WrittenObject) else copied
    if isinstance(value, (list, tuple)):
        return [_marked_copy(item) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise TypeError(f"got an object of type {type(value).__name__}")


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    return str(error)[:1000] or type(error).__name__


def named_templates(value: Any) -> dict[str, str]:
    """Return the templates of a configuration by their names: a text is `default`; a list has objects with names."""
    if isinstance(value, str):
        return {"default": value}
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    pairs = value.items() if isinstance(value, dict) else [(each.get("name"), each.get("template")) for each in entries]
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
