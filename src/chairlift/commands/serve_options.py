"""The options of `chairlift serve` beside the engine's: limits, one for each field of ServerLimits, access, and the
API."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from chairlift.errors import ConfigError
from chairlift.server.access import AccessOptions
from chairlift.server.api_options import ApiOptions
from chairlift.server.keys import load_keys
from chairlift.server.limits import HELP, ServerLimits
from chairlift.server.tools.families import FORMATS as CALL_FORMATS
from chairlift.server.tools.reasoning import FORMATS as REASONING_FORMATS

ACCESS: dict[str, Any] = {
    "api_key": Annotated[
        list[str] | None,
        typer.Option(
            help="A key that callers must bring, as SECRET or NAME=SECRET; better in the environment.",
            envvar="CHAIRLIFT_API_KEY",
            rich_help_panel="Access",
        ),
    ],
    "api_key_file": Annotated[
        Path | None,
        typer.Option(help="Keys with names, limits and weights: TOML or .jsonl.", rich_help_panel="Access"),
    ],
    "allow_unauthenticated": Annotated[
        bool,
        typer.Option("--allow-unauthenticated", help="Serve other machines without a key.", rich_help_panel="Access"),
    ],
    "ssl_certfile": Annotated[
        Path | None, typer.Option(help="Certificate (PEM), to serve TLS.", rich_help_panel="Access")
    ],
    "ssl_keyfile": Annotated[Path | None, typer.Option(help="Its private key (PEM).", rich_help_panel="Access")],
}

API: dict[str, tuple[Any, Any]] = {
    "tool_call_parser": (
        Annotated[
            str,
            typer.Option(
                help=f"How the model writes tool calls: {', '.join(CALL_FORMATS)}; auto goes by its chat template.",
                rich_help_panel="API",
            ),
        ],
        "auto",
    ),
    "reasoning_parser": (
        Annotated[
            str,
            typer.Option(
                help=f"The same for its reasoning: {', '.join(REASONING_FORMATS)}, none or auto.", rich_help_panel="API"
            ),
        ],
        "auto",
    ),
    "chat_template": (
        Annotated[Path | None, typer.Option(help="A Jinja2 file, instead of the model's.", rich_help_panel="API")],
        None,
    ),
    "trust_request_chat_template": (
        Annotated[
            bool,
            typer.Option(
                "--trust-request-chat-template", help="Let requests bring a chat template.", rich_help_panel="API"
            ),
        ],
        False,
    ),
}


def _parameters() -> list[inspect.Parameter]:
    kinds = get_type_hints(ServerLimits)
    keyword = inspect.Parameter.KEYWORD_ONLY
    limits = []
    for field in fields(ServerLimits):
        names = [f"--{field.name.replace('_', '-')}"] if field.default is False else []
        option = typer.Option(*names, help=HELP[field.name], rich_help_panel="Limits")
        limits.append(
            inspect.Parameter(
                field.name, keyword, annotation=Annotated[kinds[field.name], option], default=field.default
            )
        )
    access = [
        inspect.Parameter(name, keyword, annotation=kind, default=False if name == "allow_unauthenticated" else None)
        for name, kind in ACCESS.items()
    ]
    return [*limits, *access, *_api_parameters()]


def _api_parameters() -> list[inspect.Parameter]:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(name, keyword, annotation=kind, default=default) for name, (kind, default) in API.items()]


def _api_options(given: dict[str, Any]) -> ApiOptions:
    """Takes them out of what was given."""
    template = _read_template(given.pop("chat_template"))
    return ApiOptions(chat_template=template, **{name: given.pop(name) for name in API if name in given})


def _read_template(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template={str(file)!r} cannot be read: {error}") from None


def takes_serve_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command these options; it receives them as `limits`, `access` and `api`."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        limits = ServerLimits(**{field.name: given.pop(field.name) for field in fields(ServerLimits)})
        keys = load_keys(given.pop("api_key_file"), given.pop("api_key") or ())
        access = AccessOptions(keys, **{name: given.pop(name) for name in ACCESS if name in given})
        command(limits=limits, access=access, api=_api_options(given), **given)

    signature = inspect.signature(command, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name not in ("limits", "access", "api")]
    wrapped.__signature__ = inspect.Signature([*own, *_parameters()])  # type: ignore[attr-defined]
    return wrapped


def takes_api_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command those of the API alone; it receives them as `api`."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        command(api=_api_options(given), **given)

    signature = inspect.signature(command, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != "api"]
    wrapped.__signature__ = inspect.Signature([*own, *_api_parameters()])  # type: ignore[attr-defined]
    return wrapped
