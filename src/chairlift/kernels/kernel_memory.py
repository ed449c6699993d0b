"""KernelMemory: the memory that a kernel set needs for the matrices of a model and for a step, without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

TILE_BYTES: Final = {"cpu": 1 << 22, "cuda": 1 << 29}
"""The maximum size of the gathered K and V of a tile; on the CPU so small that the product finds them in the cache."""

SPARE_BLOCKS: Final = 1
"""Blocks of KV memory in addition to the pool, for masked writes (see `kernels.attention.KVCache`)."""


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One line of a memory plan: what takes the memory, and its size in bytes."""

    name: str
    num_bytes: int


def total(items: Iterable[MemoryItem]) -> int:
    """The sum of the bytes of all items."""
    return sum(item.num_bytes for item in items)


class NetworkSizes(NamedTuple):
    """The sizes of a feed-forward network; `num_experts` is 0 for a dense one.

    Attributes:
        num_latent_values: the number of values of a token in the results of the products with `FeedForwardSpec.latent`.
    """

    inner_size: int
    is_gated: bool
    num_experts: int = 0
    experts_per_token: int = 0
    num_latent_values: int = 0


class RecurrenceSizes(NamedTuple):
    """The sizes of a recurrence; `num_heads` is 0 in a short convolution.

    Attributes:
        in_features, out_features: the widths of its rows and results.
        num_channels: the number of channels of its convolution.
        state_values: the number of values of the state of a sequence.
    """

    in_features: int
    out_features: int
    num_channels: int
    num_heads: int
    state_values: int


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes of a layer that determine the memory of a step.

    Attributes:
        num_heads: 0 in a layer without attention.
        group: the index of its group of layers, each of which has separate block tables.
        scale, sliding_window, is_rotated: see `AttentionShape` and `AttentionBackend.forward`.
        has_plain_softmax: whether attention has neither a soft cap nor sinks.
        num_inner_values: the number of further values of a token in attention, see AttentionSpec.
    """

    group: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    is_rotated: bool
    has_plain_softmax: bool
    networks: tuple[NetworkSizes, ...]
    recurrence: RecurrenceSizes | None = None
    num_inner_values: int = 0


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes of the largest step of a model.

    Attributes:
        num_tokens, num_seqs: maximum numbers of tokens and of sequences.
        length: maximum number of slots of a sequence, in whole blocks.
        is_fused: whether the last product of each branch is added to the residual stream by its own kernel.
        row_kernels: the activations of all layers (see `kernels.activations`).
    """

    num_tokens: int
    num_seqs: int
    length: int
    block_size: int
    hidden_size: int
    is_fused: bool
    row_kernels: frozenset[str]
    layers: tuple[LayerSizes, ...]


class KernelMemory(ABC):
    """The memory of a kernel set with given number formats.

    Attributes:
        value_bytes: bytes of an activation, and of each parameter that is not in a matrix.
        logit_bytes: maximum bytes for each sampled row and token of the vocabulary, with all copies.
        prompt_logit_bytes: the same for each row of prompt logprobs.
        copies_tied_table: whether an embedding table that is tied to the LM head is stored twice, because it is also
            read by rows.
    """

    value_bytes: int
    logit_bytes: int
    prompt_logit_bytes: int
    copies_tied_table: bool = False

    @abstractmethod
    def weight_bytes(self, parts: Sequence[tuple[str, int]], in_features: int, keeps_format: bool = False) -> int:
        """Bytes of matrices that are multiplied as one, in the form that the kernel set multiplies.

        Args:
            parts: (format in the file, out_features) of each matrix.
            keeps_format: whether they keep their format if all others are quantized.
        """

    @abstractmethod
    def step(self, sizes: StepSizes) -> list[MemoryItem]:
        """An upper bound of what the layers of a step need, without K and V in blocks, logits and request rows."""
