"""The version of Chairlift, which the build reads from this file."""

from __future__ import annotations

from typing import Final

__version__: Final = "0.1.0"
