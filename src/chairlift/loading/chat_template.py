"""Chat templates: Jinja2 programs that come with a model and turn messages into a prompt. They are untrusted code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chairlift.errors import RequestError


class GenerationTag(Extension):
    """`{% generation %}` marks what the assistant says, for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def raise_exception(message: str) -> NoReturn:
    """What a template calls to refuse a conversation."""
    raise jinja2.TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` filter without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(layout: str) -> str:
    """The local time, for templates that tell the model what day it is."""
    return datetime.now().strftime(layout)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.globals.update(helpers)
    return environment


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
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self.text)

    @cached_property
    def variables(self) -> frozenset[str]:
        """What the template reads; empty if it cannot be compiled."""
        try:
            return frozenset(meta.find_undeclared_variables(_environment().parse(self.text)))
        except jinja2.TemplateSyntaxError:
            return frozenset()

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
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **variables
            )
        except jinja2.TemplateSyntaxError as error:
            problem = f"the model's chat template cannot be compiled (line {error.lineno}: {error.message})"
            raise RequestError(
                f"messages: {problem}; send a ready prompt to the completions API", "messages"
            ) from error
        except Exception as error:  # a template is a program of somebody else's: anything may come out of it
            raise RequestError(f"messages: the model's chat template refuses them: {error}", "messages") from error


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
