"""Where chat templates run: Jinja2's sandbox, which keeps them off everything but what they are given."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


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


@lru_cache(maxsize=16)
def compiled(text: str) -> jinja2.Template:
    """A template, ready to be rendered; raises TemplateSyntaxError."""
    return _environment().from_string(text)


@lru_cache(maxsize=16)
def variables_read(text: str) -> list[str]:
    """What a template reads of what it is given; raises TemplateSyntaxError."""
    return sorted(meta.find_undeclared_variables(_environment().parse(text)))
