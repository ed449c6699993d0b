"""Options of `chairlift serve` on what it tells of its calls: one for each field of ObserveOptions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from chairlift.server.observe_options import HELP, ObserveOptions


def takes_observe_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command these options; it receives them as `observe`."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        observe = ObserveOptions(**{field.name: given.pop(field.name) for field in fields(ObserveOptions)})
        command(observe=observe, **given)

    signature = inspect.signature(command, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != "observe"]
    wrapped.__signature__ = inspect.Signature([*own, *_parameters()])  # type: ignore[attr-defined]
    return wrapped


def _parameters() -> list[inspect.Parameter]:
    kinds = get_type_hints(ObserveOptions)
    parameters = []
    for field in fields(ObserveOptions):
        names = [f"--{field.name.replace('_', '-')}"] if field.default is False else []
        option = typer.Option(*names, help=HELP[field.name], rich_help_panel="Observing")
        parameter = inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[kinds[field.name], option],
            default=field.default,
        )
        parameters.append(parameter)
    return parameters
