"""Amounts of memory: parsing, formatting, and the memory of a device."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING

import psutil

from chairlift.errors import ConfigError
from chairlift.system.control_groups import ControlGroups

if TYPE_CHECKING:
    import torch

PROMPT_LOGPROB_ROWS = 256
"""Maximum number of rows of logits in memory for prompt logprobs."""

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


def available_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device now without swapping.

    On the CPU this is the smaller of the system's available memory and the rest in this process's control groups.
    """
    if device.type == "cuda":
        import torch

        free, _total = torch.cuda.mem_get_info(device)
        return free
    return available_host_memory()


def total_memory(device: torch.device) -> int:
    """Total bytes of the device; on the CPU at most the limit of this process's control groups."""
    if device.type == "cuda":
        import torch

        _free, total = torch.cuda.mem_get_info(device)
        return total
    system = int(psutil.virtual_memory().total)
    limit = ControlGroups().memory_limit()
    return system if limit is None else min(system, limit)


def available_host_memory() -> int:
    """Bytes that can be allocated on the CPU, as `available_memory`, without importing torch."""
    system = int(psutil.virtual_memory().available)
    left = ControlGroups().memory_available()
    return system if left is None else min(system, left)
