"""The sources of options: the command line, CHAIRLIFT_* variables and YAML files, parsed with cyclopts.

The parameters of a command that are dataclasses are replaced by the options that their fields declare (see
`chairlift.options`). The command line has precedence, then the environment, then the file, then the default.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    Group,
    Parameter,
    Token,
    UnknownOptionError,
    UnusedCliTokensError,
)
from cyclopts.config import Env

from chairlift.errors import ConfigError
from chairlift.options import Option, Selection, declared_options, foreign_advice, not_a_choice, unknown_option
from chairlift.system.input_files import MAX_OPTIONS_BYTES, read_text

Record = TypeVar("Record")

PREFIX: Final = "CHAIRLIFT_"
"""The variable of an option is this prefix and its name, such as CHAIRLIFT_MAX_NUM_SEQS."""

OTHER_VARIABLES: Final = frozenset({"CACHE", "CONFIG", "CPU_ISA", "OPTIONS", "URL"})
"""The variables of the cache, of kernels, of the systemd unit and of the examples, without the prefix."""

KUBERNETES_VARIABLE: Final = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_\w+)?)")
"""Kubernetes sets these, such as CHAIRLIFT_PORT=tcp://10.0.0.1:8000, for services whose names begin with chairlift."""

CONFIG_FILE: Final = "config_file"
ConfigFile = Annotated[
    Path | None,
    Parameter(
        name="--config",
        help="YAML file with options by name, such as max-num-seqs: 32. The command line and CHAIRLIFT_* variables, "
        "such as CHAIRLIFT_MAX_NUM_SEQS, have precedence.",
    ),
]
"""The type of a parameter `config_file` of a command that has `service_sources`."""

FLAG_TYPES: Final = (bool, bool | None)
KINDS: Final = {int: "an integer", float: "a number", bool: "true or false"}


class Given(frozenset[str]):
    """The names of the options that were given, for a parameter of a command with this type."""


class RecordOptions:
    """The options of a record, and of the records in its fields that have an OPTION_GROUP, their heading in --help."""

    def __init__(self, record: type[Any], selection: Selection) -> None:
        self._record = record
        hints = get_type_hints(record, include_extras=True)
        declared = declared_options(record)
        self._own = {name: about for name, about in declared.items() if selection.has(name)}
        self._inner = {name: found for name, hint in hints.items() if (found := _record_options(hint)) is not None}

    def parameters(self) -> Iterator[inspect.Parameter]:
        """The parameters of a command for these options."""
        hints, defaults = get_type_hints(self._record), {each.name: each.default for each in fields(self._record)}
        group = getattr(self._record, "OPTION_GROUP", None)
        for name, about in self._own.items():
            yield _parameter(about.name or name, about, hints[name], defaults[name], group)
        for inner in self._inner.values():
            yield from inner.parameters()

    def build(self, given: dict[str, Any], base: Any = None) -> Any:
        """Create the record from the given values, and remove them. Other values come from `base`, or are defaults."""
        values = {name: given.pop(key) for name, about in self._own.items() if (key := about.name or name) in given}
        for name, inner in self._inner.items():
            values[name] = inner.build(given, None if base is None else getattr(base, name))
        return self._record(**values) if base is None else replace(base, **values)


def _record_options(annotation: Any) -> RecordOptions | None:
    """The options of a parameter or field with this type; None if it is not a record of options."""
    kind, *about = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    if not isinstance(kind, type) or not is_dataclass(kind) or not hasattr(kind, "OPTION_GROUP"):
        return None
    return RecordOptions(kind, next((each for each in about if isinstance(each, Selection)), Selection()))


option_group = cache(Group.create_ordered)
"""The heading of options in --help, by its name. Groups have the order in which they are created."""


def _parameter(name: str, about: Option, kind: Any, default: Any, group: str | None) -> inspect.Parameter:
    """The parameter of a command for an option. A flag that is off by default has no --no- form."""
    if about.is_repeated or about.is_positional:
        kind = list[str] if default is MISSING else list[str] | None
    elif about.parse is not None:
        kind, default = (str, default) if default is MISSING else (str | None, None)
    is_constant = default is not None and kind not in FLAG_TYPES
    described = Parameter(
        name=None if about.short_name is None else (f"--{name.replace('_', '-')}", about.short_name),
        help=about.help,
        group="Arguments" if about.is_positional else option_group(group or "Options"),
        choices=None if about.parse or about.base_class else about.choices or None,
        consume_multiple=about.takes_several or None,
        negative=() if default is False or kind not in FLAG_TYPES else None,
        show_default=is_constant,
        converter=_integer if int in (kind, *get_args(kind)) else None,
    )
    positional, keyword = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(
        name,
        positional if about.is_positional else keyword,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[kind, described],
    )


def _integer(_kind: Any, tokens: Sequence[Token]) -> int:
    """Parse an integer. The converter of cyclopts rounds a number with a fraction."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise CoercionError(token=tokens[0], target_type=int) from None


def parse_error(error: CycloptsError) -> ConfigError:
    """The error of an option that cannot be parsed. It names the option, the source, the value and the valid values."""
    if isinstance(error, UnknownOptionError):
        name = (error.token.keyword or error.token.value).partition("=")[0]
        known = [each for argument in error.argument_collection for each in argument.names]
        text = unknown_option(name, known) if foreign_advice(name, known) else str(error)
        command = " ".join(("chairlift", *(error.command_chain or ())))
        return ConfigError(text if not text.endswith(f"{name}.") else f"{text} `{command} --help` lists the options")
    if isinstance(error, UnusedCliTokensError):
        return ConfigError(f"{error} Write the name of an option before each of its values.")
    if not isinstance(error, CoercionError) or (token := error.token) is None or token.keyword is None:
        return ConfigError(str(error))
    place = token.keyword if token.source in ("", "cli") else f"{token.source}: {token.keyword}"
    if error.target_type in KINDS:
        return ConfigError(f"{place} must be {KINDS[error.target_type]}, got {token.value!r:.80}")
    return ConfigError(not_a_choice(place, get_args(error.target_type), token.value))


def with_options(function: Callable[..., Any], **bases: Any) -> Callable[..., Any]:
    """Return the command with the options of its records as parameters, instead of the records.

    Args:
        bases: records whose values replace the defaults, by the name of the parameter.
    """
    signature = inspect.signature(function, eval_str=True)
    records: dict[str, RecordOptions] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if (record := _record_options(parameter.annotation)) is not None:
            records[name] = record
        elif parameter.annotation is not Given:
            parameters.append(parameter)
    for record in records.values():
        parameters += record.parameters()
    parameters.sort(key=lambda parameter: parameter.kind)
    positional = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_ONLY]

    def command(*arguments: Any, **values: Any) -> Any:
        values |= dict(zip(positional, arguments, strict=False))
        names = Given(values)
        made = {name: record.build(values, bases.get(name)) for name, record in records.items()}
        own = [values.pop(name) for name in positional if name in values]
        if "given" in signature.parameters:
            made["given"] = names
        values.pop(CONFIG_FILE, None)
        return function(*own, **values, **made)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def service_sources(
    content: Mapping[Any, Any] | None = None, source: str = "config", *, environment: bool = True
) -> tuple[Callable[..., None], ...]:
    """The sources of the options of a service in addition to the command line: the environment, and a file.

    Args:
        content: what the file would contain, instead of the file that the option --config names.
        source: the start of error messages about `content`.
        environment: CHAIRLIFT_* variables have precedence over the file.
    """

    def read_file(_app: App, _commands: Sequence[str], arguments: Any) -> None:
        found = {argument.field_info.name: argument for argument in arguments}
        file = found.pop(CONFIG_FILE, None)
        if content is not None:
            _add_values(found, content, source)
        elif file is not None and file.tokens:
            path = Path(file.tokens[0].value)
            _add_values(found, _read_yaml(path), f"config={path}")

    variables = (Env(PREFIX, command=False, show=False), _check_variables) if environment else ()
    return *variables, read_file


def _check_variables(_app: App, _commands: Sequence[str], arguments: Any) -> None:
    """Raise ConfigError for variables that no option has, and ignore empty variables and variables of Kubernetes."""
    names = [name for argument in arguments for name in (argument.field_info.name, *argument.names)]
    known = {name.lstrip("-").replace("-", "_").upper() for name in names} | OTHER_VARIABLES
    for variable, value in os.environ.items():
        name = variable.removeprefix(PREFIX)
        if value and name != variable and name not in known and not KUBERNETES_VARIABLE.fullmatch(name):
            close = get_close_matches(name, known, 1)
            hint = f"did you mean {PREFIX}{close[0]}?" if close else "remove it, or see `chairlift serve --help`"
            raise ConfigError(f"the environment variable {variable} is not an option: {hint}")
    for argument in arguments:
        argument.tokens = [
            each
            for each in argument.tokens
            if each.source != "env" or (each.value and not (each.keyword == f"{PREFIX}PORT" and "://" in each.value))
        ]


def read_options(
    record: type[Record],
    content: Mapping[Any, Any] | Path | None,
    source: str = "config",
    *,
    base: Record | None = None,
    environment: bool = True,
) -> Record:
    """Read the options of a record from a mapping or a YAML file.

    Args:
        source: the start of error messages about a mapping.
        base: has the values of the options that are not given, instead of their defaults.
        environment: CHAIRLIFT_* variables have precedence.

    Raises:
        ConfigError: the file cannot be read, or an option is unknown or has a wrong value.
    """
    taken: list[Record] = []

    def take(*, values: Any, config_file: ConfigFile = None) -> None:
        taken.append(values)

    take.__annotations__["values"] = record
    mapping = content if isinstance(content, Mapping) else None
    sources = service_sources(mapping, source, environment=environment)
    app = App(config=sources, result_action="return_value")
    app.default(with_options(take, values=base))
    arguments = ["--config", str(content)] if isinstance(content, Path) else []
    try:
        app(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise parse_error(error) from None
    return taken[0]


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    import yaml

    try:
        content = yaml.safe_load(read_text(path, MAX_OPTIONS_BYTES))
    except OSError as error:
        hint = "" if path.is_absolute() else f" (the path is relative to {Path.cwd()})"
        raise ConfigError(f"config={path} cannot be read: {error.strerror}{hint}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"config={path} is not valid YAML: {' '.join(str(error).split())}") from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"config={path} must contain options as `name: value`, got {content!r:.80}")
    return content or {}


def _add_values(found: Mapping[str, Any], content: Mapping[Any, Any], source: str) -> None:
    """Add the values of a file to the arguments that have none. Lists and objects become JSON.

    Raises:
        ConfigError: an option is unknown, is given twice, or has a value of another kind.
    """
    names: set[str] = set()
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in found:
            known = [other.replace("_", "-") for other in found]
            raise ConfigError(f"{source}: {unknown_option(name.replace('_', '-'), known)}")
        if name in names:
            raise ConfigError(f"{source}: {key} is given twice, with - and with _: remove one of them")
        names.add(name)
        argument = found[name]
        if value is None or argument.tokens:
            continue
        keyword = str(key).replace("_", "-")
        if isinstance(value, bool) and argument.hint not in FLAG_TYPES:
            problem = f"must be a number or text, got {str(value).lower()}: write text in quotes"
            raise ConfigError(f"{source}: {keyword} {problem}")
        _count, is_repeated = argument.token_count()
        for index, each in enumerate(value if is_repeated and isinstance(value, list) else [value]):
            text = json.dumps(each) if isinstance(each, dict | list) else str(each)
            if "\0" in text:
                raise ConfigError(f"{source}: {keyword} contains a null character: remove it")
            argument.append(Token(keyword=keyword, value=text, source=source, index=index))
