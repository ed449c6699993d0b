"""What every model has, whatever its mathematics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from chairlift.errors import ModelLoadError
from chairlift.kernels.attention import AttentionMetadata
from chairlift.kernels.backend import AttentionBackend
from chairlift.layers.attention import Attention
from chairlift.layers.rotary import RotaryEmbedding, rope_frequencies, stretch_llama3
from chairlift.models.config import ModelConfig
from chairlift.models.declaration import RopeConfig


class Model(ABC):
    """A decoder-only model. The caller runs it under `torch.inference_mode`.

    First `allocate_kv_cache`; then, in every step, `plan`, `forward`, and `logits` for the rows that need them.
    """

    def __init__(self, config: ModelConfig, backends: Sequence[AttentionBackend[Any]]) -> None:
        self.config = config
        self.attention_backends = backends

    @property
    @abstractmethod
    def attention_layers(self) -> Sequence[Attention]:
        """In the order of the layers."""

    @abstractmethod
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        """Run one step; writes K and V.

        Args:
            token_ids, positions: int64 [T], packed as the plan's metadata says.
            plan: what `plan` returned for this step.

        Returns:
            What `logits` takes: [T, hidden_size].
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result, [N, hidden_size], to float32 [N, vocab_size]."""

    def plan(self, metadata: AttentionMetadata) -> tuple[Any, ...]:
        """The step's plan of every attention backend; `forward` takes them."""
        return tuple(backend.plan(metadata) for backend in self.attention_backends)

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Fresh, zeroed KV memory for block ids 0 to num_blocks - 1 in every layer."""
        for layer in self.attention_layers:
            layer.allocate_kv_cache(num_blocks, block_size)


def make_rotary(rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device) -> RotaryEmbedding:
    """The rotary embedding that `rope` describes.

    Raises:
        ModelLoadError: its scaling is not supported.
    """
    frequencies = rope_frequencies(head_dim, rope.theta)
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "llama3":
        frequencies = stretch_llama3(
            frequencies,
            factor=rope.factor,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            original_max_positions=rope.original_max_position_embeddings,
        )
    elif rope.scaling == "factors":
        frequencies = frequencies / torch.tensor(rope.freq_factors)
    elif rope.scaling != "none":
        raise ModelLoadError(f"rope scaling must be none, linear, llama3 or factors, got {rope.scaling!r}")
    return RotaryEmbedding(frequencies, max_positions, device)
