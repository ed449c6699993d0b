"""Options from the environment and from a YAML file. The command line has precedence, then the environment.

A program can pass the content of the file as the object of the command's context instead of a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import typer

from chairlift.cli.option_groups import Command, OptionValues, option, with_options
from chairlift.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "CHAIRLIFT"
"""The variable of an option is this prefix and its name, such as CHAIRLIFT_MAX_NUM_SEQS."""

ENVIRONMENT_SETTINGS: Final = {"auto_envvar_prefix": ENVIRONMENT_PREFIX}
"""The context settings of a command whose options are read from the environment."""

LISTS: Final = {"allowed_hosts": ","}
"""Options that are a list in the file -> the separator on the command line. Other lists and objects are JSON there."""

NOT_IN_FILES: Final = {"config_file", "help"}


def add_config_file(command: Command) -> Command:
    """Add the option `--config` to a command."""
    config_file = option(
        "config_file",
        Path | None,
        param_decls=("--config",),
        help="YAML file with options by name, such as max-num-seqs: 32. The command line and CHAIRLIFT_* variables, "
        "such as CHAIRLIFT_MAX_NUM_SEQS, have precedence.",
        callback=_load,
        is_eager=True,
        envvar=f"{ENVIRONMENT_PREFIX}_CONFIG",
        show_envvar=False,
    )

    def make(values: OptionValues) -> OptionValues:
        del values["config_file"]
        return {}

    return with_options(command, [config_file], make)


def _load(ctx: typer.Context, path: Path | None) -> Path | None:
    _ignore_service_variables()
    if isinstance(ctx.obj, Mapping):
        ctx.default_map = check_options(ctx.obj, "config", ctx)
    elif path is not None:
        ctx.default_map = check_options(_read_yaml(path), f"config={path}", ctx)
    return path


def _ignore_service_variables() -> None:
    """Remove a variable that Kubernetes sets if a service is called chairlift: CHAIRLIFT_PORT=tcp://10.0.0.1:8000."""
    if "://" in os.environ.get(f"{ENVIRONMENT_PREFIX}_PORT", ""):
        del os.environ[f"{ENVIRONMENT_PREFIX}_PORT"]


def check_options(content: Mapping[Any, Any], source: str, ctx: typer.Context) -> dict[str, Any]:
    """Convert the content of a configuration file to the values of options, as the command line would give them.

    Args:
        source: the start of error messages, such as config=FILE.

    Raises:
        ConfigError: an option is unknown or has a wrong value.
    """
    parameters = {parameter.name: parameter for parameter in ctx.command.params}
    known = {name for name in parameters if name is not None} - NOT_IN_FILES
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{source}: {key} is not an option of this command{_suggestion(name, known)}")
        if name in values:
            raise ConfigError(f"{source}: {key} is given twice, with - and with _: remove one of them")
        if value is not None:
            values[name] = _checked(source, name, value, parameters[name], ctx)
    return values


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "" if path.is_absolute() else f" (the path is relative to {Path.cwd()})"
        raise ConfigError(f"config={path} cannot be read: {error.strerror}{hint}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"config={path} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"config={path} must contain options as `name: value`, got {content!r:.80}")
    return content


def _suggestion(name: str, known: set[str]) -> str:
    close = get_close_matches(name, known, 1)
    return f": did you mean {close[0].replace('_', '-')}?" if close else "; `--help` lists them"


def _checked(source: str, name: str, value: Any, parameter: Any, ctx: typer.Context) -> Any:
    """Convert a value to the form of the command line, and let the option check it."""
    problem = f"{source}: {name.replace('_', '-')} must be"
    if getattr(parameter, "is_flag", False):
        if not isinstance(value, bool):
            raise ConfigError(f"{problem} true or false, got {value!r:.80}")
        return value
    if isinstance(value, dict) and name == "lora_modules":
        value = [f"{module}={folder}" for module, folder in value.items()]
    if getattr(parameter, "multiple", False) or parameter.nargs == -1:
        texts: Any = [_to_text(problem, name, each) for each in (value if isinstance(value, list) else [value])]
    else:
        texts = _to_text(problem, name, value)
    try:
        parameter.process_value(ctx, texts)
    except Exception as error:
        if (message := getattr(error, "message", None)) is None:
            raise
        raise ConfigError(f"{source}: {name.replace('_', '-')}={value!r:.80}: {message}") from None
    return texts


def _to_text(problem: str, name: str, value: Any) -> str:
    if isinstance(value, bool):
        raise ConfigError(f"{problem} a number or text, got {str(value).lower()}: write text in quotes")
    if isinstance(value, list) and name in LISTS:
        return LISTS[name].join(map(str, value))
    if isinstance(value, dict) and name == "tenant_weights":
        return ",".join(f"{tenant}={weight}" for tenant, weight in value.items())
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
