"""How many KV blocks a pool gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chairlift.errors import ConfigError
from chairlift.worker.memory import available_memory, format_memory

if TYPE_CHECKING:
    import torch

FREE_MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.9}
"""Share of the free memory that KV takes by default. On a CPU the rest is for activations and everybody else on the
machine; a GPU is the engine's own, and the rest is for activations."""

SPARE_BLOCKS = 1
"""Allocated besides the pool: where masked writes go (see `chairlift.kernels.attention.KVCache`)."""


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """The size of the pool.

    Attributes:
        num_blocks: in the pool.
        block_size: slots a block.
        block_bytes: K and V of one block, over all layers.
        limited_by: "memory", "demand" where more could never be used, or the option that sets the size.
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
        """Of the allocation, the spare block included."""
        return (self.num_blocks + SPARE_BLOCKS) * self.block_bytes


def default_memory_bytes(device: torch.device) -> int:
    """The default budget: FREE_MEMORY_SHARE of what is free now, so ask once the weights are loaded."""
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
    """As many blocks as the budget holds, and no more than `max_num_seqs` sequences of full length can use.

    Args:
        slot_bytes: K and V of one token, over all layers.
        context: tokens that the model can reach at most.
        block_size: slots a block.
        memory_bytes: the budget.
        max_num_seqs: sequences that may run at once.
        max_model_len: tokens that one sequence must be able to reach. None: the model's context bounds a sequence,
            and a smaller pool is all right (the caller then takes `num_slots` as the limit).
        rounded: the blocks that an allocator takes for so many.

    Raises:
        ConfigError: the budget does not hold one block, or not one sequence of `max_model_len` tokens.
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
    spare = f"besides {SPARE_BLOCKS} spare one, at {format_memory(block_bytes)} a block of {block_size} slots"
    budget = f"the KV memory budget of {format_memory(memory_bytes)} holds {affordable} blocks ({spare})"
    wanted = format_memory((needed + SPARE_BLOCKS) * block_bytes)
    if max_model_len is None or not affordable:
        return ConfigError(
            f"{budget}, but {needed} are needed, which take {wanted}: give kv_cache_memory that much, or "
            f"lower block_size"
        )
    longest = reachable * block_size
    return ConfigError(
        f"{budget}, {longest} tokens at most for one request, but max_model_len={max_model_len} needs {needed} blocks, "
        f"which take {wanted}: give kv_cache_memory that much or set max_model_len to at most {longest}"
    )
