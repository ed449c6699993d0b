"""Native kernels for the CPU: a compiled extension, loaded when it is first needed."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import Any, Final

from chairlift.errors import ConfigError

EXTENSION: Final = f"{__name__}._native"


class NativeUnavailableError(ConfigError):
    """The extension cannot be loaded; says why and what to do."""


@cache
def load() -> Any:
    """The extension.

    Raises:
        NativeUnavailableError: it was not compiled, or this machine cannot load it.
        ConfigError: CHAIRLIFT_CPU_ISA names no instruction set of this CPU.
    """
    native = _import()
    try:
        native.isa()
    except RuntimeError as error:
        raise ConfigError(f"{error}; without it the best one is used") from None
    return native


def _import() -> Any:
    try:
        return importlib.import_module(EXTENSION)
    except ModuleNotFoundError:
        raise NativeUnavailableError(
            "the native kernels are not compiled: install a C++ compiler and install chairlift again, or run "
            "`make native` in its source tree"
        ) from None
    except ImportError as error:
        raise NativeUnavailableError(f"the native kernels cannot be loaded: {error}") from error


def loaded() -> Any | None:
    """The extension, if this process has it already."""
    return sys.modules.get(EXTENSION)
