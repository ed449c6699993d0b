"""Packages that are installed with an extra."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec

from chairlift.errors import ConfigError


def check_installed(package: str, extra: str, feature: str) -> None:
    """Check that an optional package is installed.

    Args:
        package: its import name.
        extra: the extra of Chairlift that installs it.
        feature: the command or option that needs it, for the message.

    Raises:
        ConfigError: the package is missing; the message has the install command.
    """
    if find_spec(package) is None:
        pip = f"{shlex.quote(sys.executable)} -m pip"
        raise ConfigError(f"{feature} needs {package}, which is not installed: run {pip} install 'chairlift[{extra}]'")
