"""KVCachePlan: the size of a KV pool; `plan_kv_cache` computes it from a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chairlift.errors import ConfigError
from chairlift.worker.memory import available_memory, format_memory

if TYPE_CHECKING:
    import torch

FREE_MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.9}
"""The default share of the free memory for K and V. The rest is for activations, and on a CPU for other processes as
well; a GPU is assumed to have none."""

SPARE_BLOCKS = 1
"""Blocks that are allocated in addition to the pool, for masked writes (see `chairlift.kernels.attention.KVCache`)."""


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """The size of a KV pool.

    Attributes:
        num_blocks: number of blocks in the pool.
        block_size: slots in each block.
        block_bytes: bytes of K and V of one block in all layers.
        limited_by: "memory"; "demand" if more blocks could never be used; or the option that sets the size.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    limited_by: str

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of the allocation, including the spare block."""
        return (self.num_blocks + SPARE_BLOCKS) * self.block_bytes


def default_memory_bytes(device: torch.device) -> int:
    """The default budget: FREE_MEMORY_SHARE of the free memory. Call it after the weights are loaded."""
    return int(available_memory(device) * FREE_MEMORY_SHARE[device.type])


def plan_kv_cache(
    *,
    slot_bytes: int,
    context: int,
    block_size: int,
    memory_bytes: int,
    max_num_seqs: int,
    max_model_len: int | None = None,
    rounded: Callable[[int], int] = int,
) -> KVCachePlan:
    """Plan as many blocks as fit in the budget, but no more than `max_num_seqs` sequences of full length can use.

    Args:
        slot_bytes: bytes of K and V of one token in all layers.
        context: the model's maximum number of tokens.
        block_size: slots in each block.
        memory_bytes: the budget.
        max_num_seqs: maximum number of concurrent sequences.
        max_model_len: number of tokens of one sequence that must fit in the pool. None: a pool of one block suffices,
            and the caller lowers the limit to `num_slots`.
        rounded: maps a number of blocks to the number that the allocator uses for it.

    Raises:
        ConfigError: the budget does not hold one block, or one sequence of `max_model_len` tokens.
    """
    block_bytes = slot_bytes * block_size
    affordable = max(0, memory_bytes // block_bytes - SPARE_BLOCKS)
    longest = context if max_model_len is None else max_model_len
    blocks_per_seq = rounded(-(-longest // block_size))
    needed = 1 if max_model_len is None else blocks_per_seq
    if affordable < needed:
        reachable = next((blocks for blocks in range(affordable, 0, -1) if rounded(blocks) <= affordable), 0)
        raise _too_small(block_size, block_bytes, memory_bytes, affordable, needed, max_model_len, reachable)
    usable = max_num_seqs * blocks_per_seq
    limited_by = "memory" if affordable < usable else "demand"
    return KVCachePlan(min(affordable, usable), block_size, block_bytes, limited_by)


def _too_small(
    block_size: int,
    block_bytes: int,
    memory_bytes: int,
    affordable: int,
    needed: int,
    max_model_len: int | None,
    reachable: int,
) -> ConfigError:
    spare = f"and {SPARE_BLOCKS} spare block, each of {block_size} slots and {format_memory(block_bytes)}"
    budget = f"the KV memory budget of {format_memory(memory_bytes)} holds {affordable} blocks ({spare})"
    required = format_memory((needed + SPARE_BLOCKS) * block_bytes)
    if max_model_len is None or not affordable:
        return ConfigError(
            f"{budget}, but {needed} are needed: set kv_cache_memory_bytes to at least {required}, or lower block_size"
        )
    longest = reachable * block_size
    return ConfigError(
        f"{budget}, at most {longest} tokens for one request, but max_model_len={max_model_len} needs {needed} blocks: "
        f"set kv_cache_memory_bytes to at least {required}, or max_model_len to at most {longest}"
    )
