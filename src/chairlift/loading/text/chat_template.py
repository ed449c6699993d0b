"""Chat templates: Jinja2 programs that come with a model and turn messages into a prompt. They are untrusted code, so
they run in a sandbox, in a process of its own, for a bounded time (`template_process`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from chairlift.errors import RequestError
from chairlift.loading.text.marked_text import MarkedText, from_spans, template_spans
from chairlift.loading.text.template_process import run_template


class ChatTemplate:
    """A chat template, compiled when it is first used.

    Args:
        text: the template.
        special_tokens: variables it may use (`bos_token`, `eos_token`, ...).
        from_request: it came with an API request, and runs apart from the server's own templates.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str], *, from_request: bool = False) -> None:
        self.text = text
        self._special_tokens = dict(special_tokens)
        self._from_request = from_request

    @cached_property
    def variables(self) -> frozenset[str]:
        """What the template reads; empty if it cannot be compiled."""
        answer = self._run({"do": "variables", "template": self.text})
        return frozenset(answer.get("variables", ()))

    def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        return run_template(request, from_request=self._from_request)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> MarkedText:
        """The prompt, with each character marked as template text or content.

        Content is every string of the arguments, except roles of messages and what is marked as template text in a
        field of a message.

        Args:
            messages: in OpenAI's form, made of plain JSON values.
            add_generation_prompt: end with what starts the assistant's answer.
            extra: further variables (`tools`, `documents`, ...).

        Raises:
            RequestError: the template cannot be compiled, refuses the messages or fails on them.
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, **extra}
        variables |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        request: dict[str, Any] = {"do": "render", "template": self.text, "variables": variables}
        request["template_variables"] = [name for name in self._special_tokens if name not in extra]
        request["marks"] = _marks(messages)
        answer = self._run(request)
        if "text" in answer:
            return from_spans(answer["text"], answer["spans"])
        if answer["error"] == "syntax":
            problem = f"the model's chat template cannot be compiled ({answer['message']})"
            raise RequestError(f"messages: {problem}; send a ready prompt to the completions API", "messages")
        raise RequestError(f"messages: the model's chat template refuses them: {answer['message']}", "messages")


def _marks(messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, list[tuple[int, int]]]]:
    """Index, field and spans of the message fields that hold template text, which JSON does not show."""
    return [
        (index, field, spans)
        for index, message in enumerate(messages)
        if isinstance(message, Mapping)
        for field, value in message.items()
        if isinstance(value, MarkedText) and (spans := template_spans(value))
    ]


def select_template(value: Any) -> str | None:
    """The template out of what a configuration holds: text, or a list of named ones, of which `default` is taken."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        entries = (entry for entry in value if isinstance(entry, dict) and isinstance(entry.get("name"), str))
        named = {entry["name"]: entry.get("template") for entry in entries}
        chosen = named.get("default", next(iter(named.values()), None))
        return chosen if isinstance(chosen, str) else None
    return None
