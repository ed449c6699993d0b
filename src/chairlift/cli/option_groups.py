"""Groups of command-line options: a decorated command receives the record that is made from its group of options."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from chairlift.errors import ConfigError

Command = Callable[..., None]

OptionValues = dict[str, Any]
"""The values of options by name."""

OptionRow = tuple[Any, str] | tuple[Any, str, Any]
"""Type, help text and default of an option; the default is None if it is left out."""


JSON: OptionRow = (bool, "Print one line of JSON instead of tables.", False)
"""The row of the option `json`."""


def option(
    name: str, kind: Any, default: Any = None, param_decls: Sequence[str] = (), **about: Any
) -> inspect.Parameter:
    """Create an option as a parameter of a command. A flag that is off by default has no --no- form.

    Args:
        kind: type of the option.
        param_decls: its names on the command line, if they are not derived from `name`.
        about: further arguments of `typer.Option`.
    """
    names = param_decls or ([f"--{name.replace('_', '-')}"] if default is False else [])
    about.setdefault("show_envvar", False)
    annotation = Annotated[kind, typer.Option(*names, **about)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether the parameter is given by the user, and not by its default."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def parse_json_object(name: str, text: str, example: dict[str, Any]) -> dict[str, Any]:
    """Parse the value of an option. Raises ConfigError if it is not a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object such as {json.dumps(example)}, got {text!r:.100}")
    return value


def option_group(panel: str | None = None, /, **rows: OptionRow) -> list[inspect.Parameter]:
    """Create a group of options.

    Args:
        panel: heading of the options in --help.
        rows: the options by name.
    """
    return [
        option(name, kind, *default, help=text, rich_help_panel=panel) for name, (kind, text, *default) in rows.items()
    ]


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
    """Return the command with `options` on the command line instead of the parameters named in `made`.

    Args:
        make: creates these parameters from the given values, and removes the values that it uses.
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


def add_group(*parameters: inspect.Parameter, **rows: OptionRow) -> Callable[[Command], Command]:
    """Add options to a command, which receives their values as one parameter `options`.

    Args:
        parameters: options of other groups.
        rows: further options by name.
    """
    options = [*parameters, *option_group(**rows)]
    return lambda command: with_options(
        command, options, lambda given: {"options": pop_options(given, options)}, "options"
    )
