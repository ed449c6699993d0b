"""Options that come in groups: a command takes the options of a group, and receives the record that they make."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

Command = Callable[..., None]

OptionValues = dict[str, Any]
"""What was typed, by the name of the option."""


def option(name: str, kind: Any, default: Any = None, **about: Any) -> inspect.Parameter:
    """An option of a command, as a parameter. A flag that is off has no --no- form.

    Args:
        kind: its type.
        about: more arguments of `typer.Option`.
    """
    names = [f"--{name.replace('_', '-')}"] if default is False else []
    return parameter(name, Annotated[kind, typer.Option(*names, **about)], default)


def parameter(name: str, kind: Any, default: Any = None) -> inspect.Parameter:
    """The same from a type that is annotated for typer already."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def options_from_fields(
    record: type[Any], texts: Mapping[str, str], panel: str, kinds: Mapping[str, Any] | None = None
) -> list[inspect.Parameter]:
    """The fields of a dataclass as options: name, type and default are the field's.

    Args:
        texts: of the fields that are options, what each means.
        panel: under which heading --help lists them.
        kinds: types that are written in another way on the command line.
    """
    types = {**get_type_hints(record), **(kinds or {})}
    return [
        option(field.name, types[field.name], field.default, help=texts[field.name], rich_help_panel=panel)
        for field in fields(record)
        if field.name in texts
    ]


def pop_options(given: OptionValues, options: Iterable[inspect.Parameter]) -> OptionValues:
    """The values of these options, which are no longer among the given ones."""
    return {each.name: given.pop(each.name) for each in options}


def with_options(
    command: Command, options: Iterable[inspect.Parameter], make: Callable[[OptionValues], OptionValues], *made: str
) -> Command:
    """The command with these options, in the place of its parameters `made`.

    Args:
        make: takes what it needs out of the given options, and returns those parameters.
    """

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        records = make(given)
        command(**records, **given)

    signature = inspect.signature(command, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [parameter.replace(kind=keyword) for name, parameter in signature.parameters.items() if name not in made]
    parameters = [*own, *options]
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped
