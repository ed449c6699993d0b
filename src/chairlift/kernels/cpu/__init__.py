"""Native kernels for the CPU: a compiled extension module, imported on first use."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import Final, cast

from chairlift.errors import ConfigError
from chairlift.kernels.cpu.native_extension import NativeExtension
from chairlift.kernels.kernel_set import KernelsUnavailableError

EXTENSION: Final = f"{__name__}._native"


@cache
def load() -> NativeExtension:
    """Import the extension module, once per process.

    Raises:
        KernelsUnavailableError: the extension was not compiled, or this machine cannot load it.
        ConfigError: CHAIRLIFT_CPU_ISA names no instruction set of this CPU.
    """
    native = _import()
    try:
        native.isa()
    except RuntimeError as error:
        raise ConfigError(f"{error}; unset it to use the best one") from None
    return native


def _import() -> NativeExtension:
    try:
        return cast(NativeExtension, importlib.import_module(EXTENSION))
    except ModuleNotFoundError:
        raise KernelsUnavailableError(
            "the native kernels are not compiled: install a C++ compiler and install chairlift again, or run "
            "`make native` in its source tree"
        ) from None
    except ImportError as error:
        raise KernelsUnavailableError(f"the native kernels cannot be loaded: {error}") from error


def loaded() -> NativeExtension | None:
    """The extension module if this process has imported it, else None."""
    return cast(NativeExtension | None, sys.modules.get(EXTENSION))
