"""Chat templates: Jinja2 programs that come with a model and turn messages into a prompt. They are untrusted code, so
they run in a sandbox, in a process of its own, for so long and no longer (`template_process`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from chairlift.errors import RequestError
from chairlift.loading.template_process import run_template


class ChatTemplate:
    """A chat template, compiled when it is first used.

    Args:
        text: the template.
        special_tokens: variables it may use (`bos_token`, `eos_token`, ...).
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        self.text = text
        self._special_tokens = dict(special_tokens)

    @cached_property
    def variables(self) -> frozenset[str]:
        """What the template reads; empty if it cannot be compiled."""
        answer = run_template({"do": "variables", "template": self.text})
        return frozenset(answer.get("variables", ()))

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """The prompt.

        Args:
            messages: in OpenAI's form, made of plain JSON values.
            add_generation_prompt: end with what starts the assistant's answer.
            extra: further variables (`tools`, `documents`, ...).

        Raises:
            RequestError: the template cannot be compiled, refuses the messages or stumbles over them.
        """
        variables = {**self._special_tokens, "tools": None, "documents": None, **extra}
        variables |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        answer = run_template({"do": "render", "template": self.text, "variables": variables})
        if "text" in answer:
            return str(answer["text"])
        if answer["error"] == "syntax":
            problem = f"the model's chat template cannot be compiled ({answer['message']})"
            raise RequestError(f"messages: {problem}; send a ready prompt to the completions API", "messages")
        raise RequestError(f"messages: the model's chat template refuses them: {answer['message']}", "messages")


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
