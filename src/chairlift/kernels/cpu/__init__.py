"""Native kernels for the CPU: a compiled extension module, imported on first use."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from chairlift.errors import ConfigError
from chairlift.kernels.kernel_set import KernelsUnavailableError

EXTENSION: Final = f"{__name__}._native"


@cache
def load() -> ModuleType:
    """Import the extension module, once per process.

    Raises:
        KernelsUnavailableError: the extension was not compiled, or this machine cannot load it.
        ConfigError: CHAIRLIFT_CPU_ISA names no instruction set of this CPU.
    """
    try:
        module = importlib.import_module(EXTENSION)
        module.isa()
    except ModuleNotFoundError:
        raise KernelsUnavailableError(
            "the native kernels are not compiled: install a C++ compiler and install chairlift again, or run "
            "`make native` in its source tree"
        ) from None
    except ImportError as error:
        raise KernelsUnavailableError(f"the native kernels cannot be loaded: {error}") from error
    except RuntimeError as error:
        raise ConfigError(f"{error}; unset it to use the best one") from None
    return module


def is_loaded() -> bool:
    """Whether this process has imported the extension module."""
    return EXTENSION in sys.modules


class _Extension:
    """The extension module, which is imported when one of its names is first used. Errors come from `load`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(load(), name)


if TYPE_CHECKING:
    from chairlift.kernels.cpu import _native

    native = _native
else:
    native = _Extension()
