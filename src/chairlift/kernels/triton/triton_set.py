"""The Triton kernel set before a model is loaded, and its memory. It needs neither torch nor triton yet.

Its memory is that of the torch kernels, but attention reads K and V where they are, so nothing is gathered or masked:

    attention    T d (5 heads + 3 KV heads) b: the projections, the prepared query and the result; latent attention
                 twice the values between its products more
    splits       the sums of all splits of the contexts of decodes in float32, at most MAX_SPLIT_BYTES
    graphs       on CUDA, the block tables and the memory of the largest decode step, the results of all of them, and
                 one more workspace of cuBLAS, but not what the driver needs
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from chairlift.kernels.graph_sizes import graph_sizes
from chairlift.kernels.kernel_memory import LayerSizes, MemoryItem, NetworkSizes, StepSizes, total
from chairlift.kernels.kernel_set import KernelsUnavailableError
from chairlift.kernels.torch_set import TorchKernelSet, TorchMemory
from chairlift.kernels.triton.attention_sizes import MAX_DECODE_TOKENS, MAX_SPLIT_BYTES, SPLIT_KEYS
from chairlift.kernels.triton.formats import SPLIT_PROGRAMS, SPLIT_ROWS, TILE, weight_bytes

if TYPE_CHECKING:
    from chairlift.kernels.interface import Kernels
    from chairlift.kernels.sampling import SamplingKernels


WORKSPACE_BYTES: Final = 1 << 25
"""The workspace of cuBLAS for a stream on Hopper, the largest that torch allocates by default."""


class TritonMemory(TorchMemory):
    """The memory of the Triton kernels."""

    def __init__(self, dtype: str, device: str) -> None:
        super().__init__(dtype, device)
        self._has_graphs = device == "cuda"

    def weight_bytes(self, parts: Sequence[tuple[str, int]], in_features: int, keeps_format: bool = False) -> int:
        return weight_bytes(parts, in_features, self.value_bytes)

    def step(self, sizes: StepSizes) -> list[MemoryItem]:
        items = self._results(sizes)
        if self._has_graphs:
            groups = 1 + max(layer.group for layer in sizes.layers)
            tables = 4 * groups * sizes.num_seqs * (sizes.length // sizes.block_size)
            inner = total(self._results(replace(sizes, num_tokens=min(sizes.num_tokens, sizes.num_seqs))))
            results = sum(graph_sizes(sizes.num_seqs)) * sizes.hidden_size * self.value_bytes
            items.append(MemoryItem("CUDA graphs", inner + results + tables))
            items.append(MemoryItem("workspaces of cuBLAS", 2 * WORKSPACE_BYTES))
        return items

    def _results(self, sizes: StepSizes) -> list[MemoryItem]:
        replaced = ("gathered K and V of a layer", "masks and block ids", "scores of attention", "keys in float32")
        kept = [item for item in super().step(sizes) if item.name not in replaced]
        decodes = min(sizes.num_tokens, MAX_DECODE_TOKENS * sizes.num_seqs)
        rows = decodes * -(-sizes.length // SPLIT_KEYS)
        widest = max((each.num_heads * (each.head_dim + 2) for each in sizes.layers), default=0)
        products = 4 * min(sizes.num_tokens, SPLIT_ROWS) * SPLIT_PROGRAMS * TILE
        return [*kept, MemoryItem("sums of splits", max(products, min(MAX_SPLIT_BYTES, 4 * rows * widest)))]

    def _network(self, network: NetworkSizes, tokens: int, hidden: int) -> MemoryItem:
        """With experts, all rows of the experts of a token at once."""
        item, factor = super()._network(network, tokens, hidden), 3 if network.is_gated else 2
        row = factor * network.inner_size * self.value_bytes + 4 * (network.num_latent_values + hidden)
        return MemoryItem(item.name, item.num_bytes + tokens * network.experts_per_token * row)

    def _attention(self, layer: LayerSizes, tokens: int) -> MemoryItem:
        row = layer.head_dim * (5 * layer.num_heads + 3 * layer.num_kv_heads) + 2 * layer.num_inner_values
        return MemoryItem("widest layer: attention", tokens * row * self.value_bytes)


class TritonKernelSet(TorchKernelSet):
    """The kernels for GPUs."""

    name = "triton"

    def check_available(self) -> None:
        if find_spec("triton") is None:
            raise KernelsUnavailableError("triton is not installed: pip install 'chairlift[gpu]'")

    def memory(self, dtype: str, device: str, quantization: str | None) -> TritonMemory:
        return TritonMemory(dtype, device)

    def make_kernels(self, quantization: str | None) -> Kernels:
        assert quantization is None, "only native kernels quantize"
        self.check_available()
        import torch

        if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
            raise KernelsUnavailableError(
                "triton kernels need a CUDA device, and torch finds none: choose kernels=native or kernels=torch"
            )
        from chairlift.kernels.triton.kernels import triton_kernels

        return triton_kernels()

    def make_sampling(self) -> SamplingKernels:
        from chairlift.kernels.triton.sampling import TritonSampling

        return TritonSampling()
