"""ChatTemplate: the Jinja2 program of a model that renders messages to a prompt.

Templates are untrusted code. They run in a sandbox, in a separate process, for a bounded time (`template_process`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from chairlift.errors import RequestError
from chairlift.loading.text.marked_text import MarkedText, from_spans, template_spans
from chairlift.loading.text.template_process import run_template


class ChatTemplate:
    """A chat template, which is compiled when it is first used.

    Args:
        text: the source of the template.
        special_tokens: the special tokens by their variable names (`bos_token`, `eos_token`, ...).
        from_request: whether the template is part of an API request. Such templates run in a process of their own.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str], *, from_request: bool = False) -> None:
        self.text = text
        self._special_tokens = dict(special_tokens)
        self._from_request = from_request

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the template reads; empty if it cannot be compiled."""
        request = {"operation": "variables", "template": self.text}
        answer = run_template(request, from_request=self._from_request)
        return frozenset(answer.get("variables", ()))

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> MarkedText:
        """Render the prompt, with each character marked as template text or content.

        Every string of the arguments is content, except the roles of messages and template text in a message field.

        Args:
            messages: messages in OpenAI's format, of plain JSON values.
            add_generation_prompt: whether the prompt ends with the start of the assistant's turn.
            extra: further variables (`tools`, `documents`, ...).

        Raises:
            RequestError: The template cannot be compiled, or rejects the messages or fails on them.
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, **extra}
        variables |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        request: dict[str, Any] = {"operation": "render", "template": self.text, "variables": variables}
        request["template_variables"] = [name for name in self._special_tokens if name not in extra]
        request["marks"] = _marks(messages)
        answer = run_template(request, from_request=self._from_request)
        if "text" in answer:
            return from_spans(answer["text"], answer["spans"])
        if answer["error"] == "syntax":
            problem = f"the model's chat template cannot be compiled ({answer['message']})"
            raise RequestError(f"messages: {problem}; send the rendered prompt to the completions API", "messages")
        raise RequestError(f"messages: the model's chat template rejects them: {answer['message']}", "messages")


def _marks(messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, list[tuple[int, int]]]]:
    """Return index, field and spans of the message fields that contain template text, since JSON loses the marks."""
    return [
        (index, field, spans)
        for index, message in enumerate(messages)
        if isinstance(message, Mapping)
        for field, value in message.items()
        if isinstance(value, MarkedText) and (spans := template_spans(value))
    ]


def select_template(value: Any) -> str | None:
    """Return the template of a configuration: its text, or of a list of named templates the entry `default` or else the
    first one."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        entries = (entry for entry in value if isinstance(entry, dict) and isinstance(entry.get("name"), str))
        named = {entry["name"]: entry.get("template") for entry in entries}
        chosen = named.get("default", next(iter(named.values()), None))
        return chosen if isinstance(chosen, str) else None
    return None
