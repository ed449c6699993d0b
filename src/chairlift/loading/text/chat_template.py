"""ChatTemplate: the Jinja2 program of a model that renders messages to a prompt.

Templates run in a sandbox without access to files, the environment or other objects of the process; see
`template_sandbox` for its limits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Final, NamedTuple

import jinja2
from jinja2 import meta

from chairlift.errors import RequestError
from chairlift.loading.text import template_sandbox
from chairlift.loading.text.marked_text import MarkedText, template_text
from chairlift.loading.text.template_sandbox import TemplateEnvironment
from chairlift.loading.text.written_object import WrittenObject

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles that are template text, because some templates build special tokens from them, such as `<|user|>`."""

RESERVED_VARIABLES: Final = ("messages", "self", "add_generation_prompt", "tools", "documents", "reasoning_effort")
"""Variables of a chat template that `chat_template_kwargs` must not set."""

PROBES: Final = ("qzvx", "qzvy", "qzvz")
"""Texts of two parts, and of a further key of parts, by which a prompt shows how a template reads content."""

PROBE_TOOL: Final = {
    "type": "function",
    "function": {"name": "a", "description": "a", "parameters": {"type": "object"}},
}
PROBE_CALL: Final = {"id": "abcdefghi", "type": "function", "function": {"name": "a", "arguments": {}}}


class TextParts(str):
    """The content of a message that is a list of texts: the texts that are not empty, with a line break between them.

    A template that reads lists gets a part for each text. A text that is computed from this one is a plain string.
    """

    texts: tuple[str, ...]

    def __new__(cls, texts: Iterable[str]) -> TextParts:
        kept = tuple(filter(None, texts))
        made = super().__new__(cls, "\n".join(kept))
        made.texts = kept
        return made


class ContentForm(NamedTuple):
    """The forms of the content of a message that a template reads: a text, a list of one part, or one of several."""

    reads_text: bool = True
    reads_part: bool = False
    reads_parts: bool = False

    def adapted(self, content: Any) -> Any:
        """The content in a form that the template reads: a list as a list, and a text as a text, if it reads both."""
        if not isinstance(content, str) or (self.reads_text and not isinstance(content, TextParts)):
            return content
        if self.reads_parts:
            return _parts(*((isinstance(content, TextParts) and content.texts) or (content,)))
        return _parts(content) if self.reads_part and not self.reads_text else content


def _parts(*texts: str, **others: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text, **others} for text in texts]


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
        self._forms: dict[tuple[bool, str], ContentForm] = {}
        self._probe_seconds = 0.0

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the template reads; empty if it cannot be compiled."""
        try:
            return frozenset(meta.find_undeclared_variables(TemplateEnvironment().parse(self.text)))
        except (jinja2.TemplateError, RecursionError):
            return frozenset()

    def check_variables(self, names: Iterable[str]) -> None:
        """Raise RequestError if the template does not read one of these variables, which are fields of a request."""
        for name in sorted(set(names) - self.variables):
            close = get_close_matches(name, self.variables, 1)
            advice = f"did you mean {close[0]}?" if close else "leave it out"
            problem = f"the chat template of this model does not read {name!r}, so it would have no effect"
            raise RequestError(f"{name}: {problem}: {advice}", name)

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
            messages: messages in OpenAI's format, of plain JSON values. Content is a string, and becomes a list of
                parts for a template that reads lists.
            add_generation_prompt: whether the prompt ends with the start of the assistant's turn.
            extra: further variables (`tools`, `documents`, ...).

        Raises:
            RequestError: the template cannot be compiled, or rejects the messages or fails on them, or a value is not
                one of JSON.
        """
        has_tools = extra.get("tools") is not None
        adapted = [self._adapted(message, has_tools) for message in messages]
        return self._rendered(adapted, has_tools, {**extra, "add_generation_prompt": add_generation_prompt})

    def _adapted(self, message: Any, has_tools: bool) -> Any:
        if not isinstance(message, Mapping) or not isinstance(content := message.get("content"), str):
            return message
        return {**message, "content": self._form(str(message.get("role")), has_tools).adapted(content)}

    def _form(self, role: str, has_tools: bool) -> ContentForm:
        """The form of content that the template reads in messages of this role, from the prompts of probes.

        A template that reads no form, or whose probes take half of the time that one prompt may take, gets texts.
        """
        role = role if role in ROLES else "user"
        if (form := self._forms.get((has_tools, role))) is None:
            one, other, note = PROBES
            contents = one, _parts(one, note=note), _parts(one, other, note=note)
            found = ContentForm(*(self._shows(role, has_tools, content) for content in contents))
            form = self._forms[has_tools, role] = found if any(found) else ContentForm()
        return form

    def _shows(self, role: str, has_tools: bool, content: Any) -> bool:
        """Whether the prompt of a message with this content has its texts, but not the further keys of its parts."""
        if self._probe_seconds > template_sandbox.CPU_SECONDS / 2:
            return False
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        messages = self._probe_conversation({"role": role, "content": content}, has_tools)
        started = time.thread_time()
        try:
            prompt = self._rendered(messages, has_tools, {"tools": [PROBE_TOOL] if has_tools else None})
        except RequestError:
            return False
        finally:
            self._probe_seconds += time.thread_time() - started
        return all(text in prompt for text in texts) and PROBES[-1] not in prompt

    def _probe_conversation(self, probed: dict[str, Any], has_tools: bool) -> list[dict[str, Any]]:
        role = probed["role"]
        if role == "user":
            return [probed]
        user = self._adapted({"role": "user", "content": "a"}, has_tools)
        if role in ("system", "developer"):
            return [probed, user]
        if role == "assistant":
            return [user, probed, user]
        calling = self._adapted({"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}, has_tools)
        return [user, calling, {**probed, "name": "a", "tool_call_id": PROBE_CALL["id"]}]

    def _rendered(self, messages: Sequence[Any], has_tools: bool, extra: Mapping[str, Any]) -> MarkedText:
        """As `render`, for messages whose content has the form that the template reads."""
        variables = {**self._special_tokens, "add_generation_prompt": True, "tools": None, "documents": None, **extra}
        variables["messages"] = messages
        try:
            marked = _marked_copy(variables)
        except (TypeError, RecursionError) as error:
            raise RequestError(f"messages: must contain only JSON values: {error}", "messages") from None
        for message in marked["messages"]:
            if isinstance(message, dict) and (role := message.get("role")) in ROLES:
                message["role"] = template_text(role)
        try:
            text = self._compiled[has_tools].render(marked)
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
