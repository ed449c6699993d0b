"""The native kernel set before a model is loaded, and its memory; importing this module does not load the extension.

Matrices are in the formats of the file or in the configured one, and all else is float32.

All layers write to the same rows. With T tokens, hidden size H, and for the widest layer Q and K as the widths of
queries and keys, I as the inner size and d as the head size, the numbers of values of a step are:

    residual stream   3 T H (OPT adds positions); 5 T H if a norm or factor comes between a product and the sum
    attention         T (2 Q + 2 K), T d for the rotation, and the values between the products of latent attention
    MLP               2 T I
    product inputs    T times the widest input, with scales, and T I for outputs converted to the inputs of the next
                      product; at most float32
    experts           T (H + E + 4 k) with E experts, of which each token has k
    recurrence        T times input, output and two values for each head
    torch             2 T I for an activation that torch computes because native kernels lack it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chairlift.kernels.activations import NATIVE_PROLOGUES
from chairlift.kernels.cpu import is_loaded, load, native
from chairlift.kernels.cpu.formats import matrix_bytes, packed_parts
from chairlift.kernels.kernel_memory import KernelMemory, MemoryItem, StepSizes
from chairlift.kernels.kernel_set import KernelSet

if TYPE_CHECKING:
    from chairlift.kernels.interface import Kernels
    from chairlift.kernels.sampling import SamplingKernels


class NativeMemory(KernelMemory):
    """The memory of the native kernels.

    A sampled row has for each token a logit, a copy for logprobs, and a penalty count.
    """

    value_bytes = 4
    logit_bytes = 12
    prompt_logit_bytes = 4

    def __init__(self, quantization: str | None) -> None:
        self._quantization = quantization

    def weight_bytes(self, parts: Sequence[tuple[str, int]], in_features: int, keeps_format: bool = False) -> int:
        found = packed_parts(parts, None if keeps_format else self._quantization)
        return sum(matrix_bytes(name, out, in_features) for name, out in found)

    def step(self, sizes: StepSizes) -> list[MemoryItem]:
        tokens, hidden, layers = sizes.num_tokens, sizes.hidden_size, sizes.layers
        networks = [network for layer in layers for network in layer.networks]
        inner = max(network.inner_size for network in networks)
        shapes = {(each.head_dim, each.num_heads, each.num_kv_heads, each.num_inner_values) for each in layers}
        queries = max(head_dim * heads for head_dim, heads, _, _ in shapes)
        recurrences = [layer.recurrence for layer in layers if layer.recurrence is not None]
        mixed = max((each.out_features for each in recurrences), default=0)
        widest, copies = max(hidden, queries, inner, mixed), 3 if sizes.is_fused else 5
        values = [
            ("residual stream", copies * hidden),
            ("attention", sum(size * (2 * heads + 2 * kv_heads + 1) + rows for size, heads, kv_heads, rows in shapes)),
            ("MLP", 2 * inner),
            ("inputs of the products", 2 * widest),
        ]
        if num_experts := max(network.num_experts for network in networks):
            chosen = max(network.experts_per_token for network in networks)
            in_latent = max(network.num_latent_values for network in networks)
            values.append(("experts", hidden + in_latent + num_experts + 4 * chosen))
        if recurrences:
            width, heads = max(each.in_features for each in recurrences), max(each.num_heads for each in recurrences)
            values.append(("recurrence", width + mixed + 2 * heads))
        if not sizes.row_kernels.issubset(NATIVE_PROLOGUES):
            values.append(("rows that torch computes", 2 * inner))
        return [MemoryItem(name, tokens * count * self.value_bytes) for name, count in values]


class NativeKernelSet(KernelSet):
    """The compiled kernels for the CPU."""

    name = "native"

    @property
    def description(self) -> str:
        return f"{self.name} ({native.isa()})"

    def check_available(self) -> None:
        load()

    def memory(self, dtype: str, device: str, quantization: str | None) -> NativeMemory:
        return NativeMemory(quantization)

    def make_kernels(self, quantization: str | None) -> Kernels:
        from chairlift.kernels.cpu.kernel_set import native_kernels

        return native_kernels(quantization)

    def make_sampling(self) -> SamplingKernels | None:
        from chairlift.kernels.cpu.sampling import NativeSampling

        return NativeSampling()

    def running(self) -> tuple[str, int] | None:
        return (native.isa(), native.num_threads()) if is_loaded() else None

    def set_num_threads(self, num_threads: int) -> int:
        """Set the threads of the native kernels, and give torch one thread, so that they do not compete for CPUs."""
        import torch

        native.set_num_threads(num_threads)
        torch.set_num_threads(1)
        return num_threads
