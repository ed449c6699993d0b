"""KVCachePlan: the size of a KV pool."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.kernels.kernel_memory import SPARE_BLOCKS


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """The size of a KV pool.

    Attributes:
        num_blocks: number of blocks in the pool.
        block_size: slots in each block.
        block_bytes: bytes of K and V of one block in the layers of one group.
        limited_by: "memory"; "demand" if more blocks could never be used; or the option that sets the size.
        windows: the window of each group of layers (see `models.kv_layout.KVLayout`).
        state_bytes: bytes of the recurrent state of one sequence; 0 if the model has none.
        num_states: number of states of running requests.
        num_draft_states: number of states after draft tokens of a step.
        num_checkpoints: number of states that are kept for prefixes.
        checkpoint_interval: tokens between the checkpoints of a long sequence.
        draft_model_state_bytes: as `state_bytes`, of the draft model, which has no checkpoints.
        num_swap_blocks: number of blocks of the swap space, in host memory.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    limited_by: str
    windows: tuple[int | None, ...] = (None,)
    state_bytes: int = 0
    num_states: int = 0
    num_draft_states: int = 0
    num_checkpoints: int = 0
    checkpoint_interval: int = 0
    draft_model_state_bytes: int = 0
    num_swap_blocks: int = 0

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_state_slots(self) -> int:
        """The number of recurrent states of running requests, of draft tokens and of checkpoints."""
        return self.num_states + self.num_draft_states + self.num_checkpoints

    @property
    def running_state_bytes(self) -> int:
        """Bytes of the recurrent states of running requests and of draft tokens."""
        return (self.num_states + self.num_draft_states) * (self.state_bytes + self.draft_model_state_bytes)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, including the spare block."""
        return (self.num_blocks + SPARE_BLOCKS) * self.block_bytes

    @property
    def swap_bytes(self) -> int:
        """Bytes of the swap space, which are not part of `num_bytes`."""
        return self.num_swap_blocks * self.block_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the allocation: K and V, and recurrent states."""
        return self.kv_bytes + self.running_state_bytes + self.num_checkpoints * self.state_bytes
