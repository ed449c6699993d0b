"""BlockCopier: copies blocks within the pool, and between it and the swap space in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from chairlift.kernels.attention import KVCache
from chairlift.outputs import SchedulerOutput
from chairlift.worker.disk_block_store import cache_tensors
from chairlift.worker.step_extension import StepExtension


class BlockCopier(StepExtension):
    """Makes the copies of a step before it is computed.

    Blocks of the swap space have the form of the blocks of the pool. On CUDA they are in pinned memory, and copies are
    asynchronous. They are in the order of the steps, because they are on the stream that computes the steps.

    Args:
        caches: the KV memory of each layer.
        num_blocks: number of blocks in the swap space.
    """

    def __init__(self, caches: Iterable[KVCache], num_blocks: int) -> None:
        self._pool = [tensor for cache in caches for tensor in cache_tensors(cache)]
        self._swapped = [
            torch.empty((num_blocks, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            for tensor in self._pool
        ]

    def begin(self, output: SchedulerOutput) -> None:
        """Make the copies of a step."""
        if not (output.copied_blocks or output.swapped_out or output.swapped_in):
            return
        for pool, swapped in zip(self._pool, self._swapped, strict=True):
            is_one_memory = pool.device == swapped.device
            copy_blocks(pool, swapped, output.swapped_out, is_one_memory)
            copy_blocks(pool, pool, output.copied_blocks, True)
            copy_blocks(swapped, pool, output.swapped_in, is_one_memory)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, blocks: Mapping[int, int], is_one_memory: bool) -> None:
    """Copy the block `blocks[i]` of `source` to block i of `target`: at once within a memory, and otherwise one by one,
    without waiting for the device."""
    if not is_one_memory:
        for target_id, source_id in blocks.items():
            target[target_id].copy_(source[source_id], non_blocking=True)
    elif blocks:
        targets, sources = (torch.tensor(list(ids), device=source.device) for ids in (blocks, blocks.values()))
        target[targets] = source[sources]
