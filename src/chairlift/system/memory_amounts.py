"""Parses and formats amounts of memory such as "4 GiB"."""

from __future__ import annotations

import re
from decimal import Decimal

from chairlift.errors import ConfigError

DECIMAL_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BINARY_UNITS = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
_MEMORY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_memory(text: str | int, field: str = "memory") -> int:
    """Parse an amount such as "4GiB", "1.5 GB", "1048576" or 1048576 to bytes.

    Units are KB to TB (powers of 1000) and KiB to TiB (powers of 1024).

    Args:
        field: the name of the option, for the error message.

    Raises:
        ConfigError: the text has another form, or the amount is less than one byte.
    """
    match = None if isinstance(text, bool) else _MEMORY.fullmatch(str(text))
    units = DECIMAL_UNITS | {name.upper(): size for name, size in BINARY_UNITS.items()}
    unit = units.get((match[2] or "B").upper()) if match else None
    num_bytes = int(Decimal(match[1]) * unit) if match and unit else 0
    if num_bytes < 1:
        raise ConfigError(
            f"{field} must be a positive amount such as 4GiB, 800MB or 1073741824 (bytes), got {text!r}; "
            "units: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        )
    return num_bytes


def format_memory(num_bytes: int) -> str:
    """Format an amount in the largest binary unit that it reaches: 1536 -> "1.5 KiB"."""
    for unit, size in BINARY_UNITS.items():
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} bytes"
