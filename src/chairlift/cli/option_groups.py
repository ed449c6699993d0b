"""Groups of command-line options: a decorated command receives the record that is made from its group of options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

Command = Callable[..., None]

OptionValues = dict[str, Any]
"""The values of options by name."""


def option(name: str, kind: Any, default: Any = None, **about: Any) -> inspect.Parameter:
    """Create an option as a parameter of a command. A flag that is off by default has no --no- form.

    Args:
        kind: type of the option.
        about: further arguments of `typer.Option`.
    """
    names = [f"--{name.replace('_', '-')}"] if default is False else []
    return parameter(name, Annotated[kind, typer.Option(*names, **about)], default)


def parameter(name: str, kind: Any, default: Any = None) -> inspect.Parameter:
    """Create an option from a type that is annotated for typer."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def options_from_fields(
    record: type[Any], texts: Mapping[str, str], panel: str, kinds: Mapping[str, Any] | None = None
) -> list[inspect.Parameter]:
    """Create an option for each field of a dataclass, with its name, type and default.

    Args:
        texts: the help text of each field that is an option.
        panel: heading of the options in --help.
        kinds: types that differ on the command line.
    """
    types = {**get_type_hints(record), **(kinds or {})}
    return [
        option(field.name, types[field.name], field.default, help=texts[field.name], rich_help_panel=panel)
        for field in fields(record)
        if field.name in texts
    ]


def pop_options(given: OptionValues, options: Iterable[inspect.Parameter]) -> OptionValues:
    """Remove the values of these options from the given ones and return them."""
    return {each.name: given.pop(each.name) for each in options}


def with_options(
    command: Command, options: Iterable[inspect.Parameter], make: Callable[[OptionValues], OptionValues], *made: str
) -> Command:
    """Replace the parameters `made` of a command by options.

    Args:
        make: removes its options from the given ones and returns the parameters `made`.
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
