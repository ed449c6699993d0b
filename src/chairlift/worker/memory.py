"""The total and the available memory of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from chairlift.system.control_groups import ControlGroups

if TYPE_CHECKING:
    import torch

PROMPT_LOGPROB_ROWS = 256
"""Maximum number of rows of logits in memory for prompt logprobs."""


def available_memory(device: torch.device | None = None) -> int:
    """Bytes that can be allocated on the device, or for None on the CPU, now without swapping.

    On the CPU this is the smaller of the system's available memory and the rest in this process's control groups.
    """
    if device is not None and device.type == "cuda":
        import torch

        free, _total = torch.cuda.mem_get_info(device)
        return free
    system = int(psutil.virtual_memory().available)
    left = ControlGroups().memory_available()
    return system if left is None else min(system, left)


def total_memory(device: torch.device) -> int:
    """Total bytes of the device; on the CPU at most the limit of this process's control groups."""
    if device.type == "cuda":
        import torch

        _free, total = torch.cuda.mem_get_info(device)
        return total
    system = int(psutil.virtual_memory().total)
    limit = ControlGroups().memory_limit()
    return system if limit is None else min(system, limit)
