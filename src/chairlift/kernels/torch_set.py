"""The kernel set "torch" before a model is loaded, and its memory. It needs neither torch nor an extension module yet.

Its memory consists of the parameters in the compute type and an upper bound of a step.

With T tokens, N sequences, L slots of the longest one, hidden size H, inner size I, and b bytes for each value:

    residual stream   4 T H b; 6 T H b if a layer has an operation between a product and the residual sum
    widest layer      max(attention T d (7 heads + 3 KV heads) b + rotation in float32, MLP 3 T I b (ungated 2));
                      latent attention twice the values between its products more;
                      with E experts, of which each token has k, MLP T (5 H b + 32 E + 12 k) more;
                      recurrence of F inputs, C channels and O outputs in float32, T (F + 6 C + 6 O), and 4 N states
    gathered K, V     one tile or the longest sequence of one layer, twice, because it may grow within a step
    masks             for every chunk and decode over all L keys, one set for each window, backend and group
    scores            only with a soft cap or sinks, for which torch has no fused kernel: T heads L (4 twice, and b),
                      and the gathered keys in float32

The sum is an upper bound, because these are never all in memory at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from chairlift.kernels.kernel_memory import (
    DTYPE_BYTES,
    TILE_BYTES,
    KernelMemory,
    LayerSizes,
    MemoryItem,
    NetworkSizes,
    RecurrenceSizes,
    StepSizes,
)
from chairlift.kernels.kernel_set import KernelSet

if TYPE_CHECKING:
    from chairlift.kernels.interface import Kernels

PACKED_DTYPES: Final = ("float32", "bfloat16")
"""The types of matrices that are stored in packed form on the CPU, and in no other form."""


class TorchMemory(KernelMemory):
    """The memory of the torch kernels.

    The float32 logits of a sampled row (4 bytes a token) have copies for logprobs (4), drawn rows (4) and filtered rows
    (4), a full sort (values 4, ids 8), its cumulative sum and the sum before each token (8 + 8), and penalty counts
    (4); the logits of prompt logprobs (4) have log_softmax and ranks (8). The logits in the compute type are added.
    """

    def __init__(self, dtype: str, device: str) -> None:
        size = self.value_bytes = DTYPE_BYTES[dtype]
        self.logit_bytes, self.prompt_logit_bytes = 48 + size, 12 + size
        self.copies_tied_table = device == "cpu" and dtype in PACKED_DTYPES
        self._tile_bytes = TILE_BYTES[device]

    def weight_bytes(self, parts: Sequence[tuple[str, int]], in_features: int, keeps_format: bool = False) -> int:
        return sum(out for _, out in parts) * in_features * self.value_bytes

    def step(self, sizes: StepSizes) -> list[MemoryItem]:
        tokens, hidden, size = sizes.num_tokens, sizes.hidden_size, self.value_bytes
        copies = 4 if sizes.is_fused else 6
        branches = [self._attention(layer, tokens) for layer in sizes.layers]
        branches += [
            _recurrence(layer.recurrence, tokens, sizes.num_seqs) for layer in sizes.layers if layer.recurrence
        ]
        branches += [self._network(each, tokens, hidden) for layer in sizes.layers for each in layer.networks]
        return [
            MemoryItem("residual stream", copies * tokens * hidden * size),
            max(branches, key=lambda item: item.num_bytes),
            self._gathered(sizes),
            self._masks(sizes),
            *self._scores(sizes),
        ]

    def _attention(self, layer: LayerSizes, tokens: int) -> MemoryItem:
        heads, kv_heads, dim, size = layer.num_heads, layer.num_kv_heads, layer.head_dim, self.value_bytes
        rotation = 4 * dim * (4 * heads + 4) if layer.is_rotated else 0
        row = (dim * (7 * heads + 3 * kv_heads) + 2 * layer.num_inner_values) * size + rotation + 32 * kv_heads
        return MemoryItem("widest layer: attention", tokens * row)

    def _network(self, network: NetworkSizes, tokens: int, hidden: int) -> MemoryItem:
        """The inner rows; with experts also the rows that one expert may have, which are all, the logits and choice."""
        inner, gated, num_experts, chosen, latent = network
        factor, size = 3 if gated else 2, self.value_bytes
        if not num_experts:
            return MemoryItem("widest layer: MLP", tokens * factor * inner * size)
        row = (factor * inner + 5 * hidden + latent) * size + 32 * num_experts + 12 * chosen
        return MemoryItem("widest layer: experts", tokens * row)

    def _gathered(self, sizes: StepSizes) -> MemoryItem:
        """The gathered K and V of all attention backends, each of which has its own tile."""
        count = 0
        for *_, key_size in dict.fromkeys(_backend(layer) for layer in sizes.layers if layer.num_heads):
            sequence = sizes.length * 2 * key_size * self.value_bytes
            count += min(max(self._tile_bytes, sequence), sizes.num_seqs * sequence)
        return MemoryItem("gathered K and V of a layer", 2 * count)

    def _masks(self, sizes: StepSizes) -> MemoryItem:
        size, tokens, length = self.value_bytes, sizes.num_tokens, sizes.length
        seqs = min(sizes.num_seqs, tokens)
        with_attention = [layer for layer in sizes.layers if layer.num_heads]
        count = len({(layer.group, layer.sliding_window, *_backend(layer)) for layer in with_attention})
        ids = (8 * max(layer.num_kv_heads for layer in sizes.layers) + 32) * (length // sizes.block_size)
        row = length * (size + 9) + ids
        return MemoryItem("masks and block ids", count * (tokens * length * (size + 1) + seqs * row))

    def _scores(self, sizes: StepSizes) -> Iterator[MemoryItem]:
        heads = max((layer.num_heads for layer in sizes.layers if not layer.has_plain_softmax), default=0)
        if heads:
            value = 8 + self.value_bytes
            yield MemoryItem("scores of attention", sizes.num_tokens * heads * sizes.length * value)
            if self.value_bytes < 4:
                yield MemoryItem("keys in float32", self._gathered(sizes).num_bytes // self.value_bytes)


def _recurrence(recurrence: RecurrenceSizes, tokens: int, num_seqs: int) -> MemoryItem:
    """The rows and their copies in float32, and the states with the terms of their sums."""
    inputs, outputs, channels, _, state = recurrence
    count = tokens * (inputs + 6 * channels + 6 * outputs) + 4 * num_seqs * state
    return MemoryItem("widest layer: recurrence", 4 * count)


def _backend(layer: LayerSizes) -> tuple[float, int, int, int]:
    """What distinguishes the attention backends of a model; the last value is the number of values of a key."""
    return layer.scale, layer.num_heads * layer.head_dim, layer.head_dim, layer.num_kv_heads * layer.head_dim


class TorchKernelSet(KernelSet):
    """The kernels of torch, for every device."""

    name = "torch"

    def memory(self, dtype: str, device: str, quantization: str | None) -> TorchMemory:
        return TorchMemory(dtype, device)

    def make_kernels(self, quantization: str | None) -> Kernels:
        from chairlift.kernels.torch_kernels import TORCH

        assert quantization is None, "only native kernels quantize"
        return TORCH

    def set_num_threads(self, num_threads: int) -> int:
        import torch

        torch.set_num_threads(num_threads)
        return 1
