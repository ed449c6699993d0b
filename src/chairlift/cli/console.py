"""What commands write to the terminal, and the settings that commands with an engine share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

from cyclopts import Group, Parameter

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.options import declared_options
from chairlift.system.log_format import LogFormatter
from chairlift.system.memory_limits import check_address_space

MODEL_HELP: Final = declared_options(EngineConfig)["model"].help

FLAG: Final = Parameter(negative=(), show_default=False)
"""An option without a value that is off by default."""

Json = Annotated[bool, FLAG, Parameter(name="--json", help="Print one line of JSON instead of tables.")]

ARGUMENTS, OPTIONS = (Group(name, sort_key=number) for number, name in enumerate(("Arguments", "Options")))
"""The first headings of --help."""

SAMPLING_DEFAULTS: Final = ("generation_config", "override_generation_config")
"""The options of the engine that affect only requests of the API."""


def print_error(text: str) -> None:
    """Print a message about an error to standard error."""
    print_notice(f"error: {text}", "red")


def print_notice(text: str, style: str = "dim") -> None:
    """Print a line to standard error, with a style of rich if it is a terminal."""
    from rich.console import Console

    Console(stderr=True).print(text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)


@contextmanager
def input_errors_explained() -> Iterator[None]:
    """Raise ConfigError if the standard input, which is read inside, is not text in its encoding."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the standard input cannot be decoded: {error}; convert it to {sys.stdin.encoding}, for example with iconv"
        ) from None


def check_model(model: str | None, *, accept_terms: bool = False) -> None:
    """Find a model and check its files before torch is imported. Raises ModelLoadError as `resolve_model`, and if a
    file is damaged; ConfigError if the address space is too small for an engine."""
    from chairlift.loading.resolve import resolve_model

    check_address_space()
    resolve_model(model, accept_terms=accept_terms).check()


def prepare_engine(log_format: str = "text") -> None:
    """Write the log to standard error, without a traceback for lines that cannot be written.

    Args:
        log_format: "json" for lines of JSON.

    Raises:
        ConfigError: the address space is too small for an engine.
    """
    logging.raiseExceptions = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(as_json=log_format == "json"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    check_address_space()
