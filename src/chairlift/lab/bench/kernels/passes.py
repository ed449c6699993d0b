"""Kernels in the order and over the memory of a real step, timed one by one.

A pass goes through all layers of the model, so weights and K and V come from memory as they do in a step, and not from
a cache that the call before filled. Weights and activations are normal random numbers: the products take the same time
whatever their values, but for outliers, of which a model has more.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from chairlift.kernels.activations import find_activation, has_native_kernel
from chairlift.kernels.attention import AttentionMetadata, KVCache
from chairlift.kernels.backend import AttentionShape
from chairlift.kernels.cpu.attention import NativeAttention, NativePlan
from chairlift.kernels.cpu.formats import FLOATS
from chairlift.kernels.cpu.kernel_set import NativeMatrix, native_kernels
from chairlift.kernels.cpu.native_extension import NativeExtension
from chairlift.kernels.cpu.sampling import NativeSampling
from chairlift.kernels.cpu.tape import MAX_ROWS, record_calls
from chairlift.kernels.linear import NO_PROLOGUE, NORM_KINDS, LinearKernel, Prologue
from chairlift.kernels.sampling import SamplingParameters
from chairlift.lab.bench.kernels.ceilings import Work
from chairlift.models.config import ModelConfig
from chairlift.models.declaration import LM_HEAD, AttentionSpec, MatrixSpec, ProductSpec
from chairlift.models.decoder import attention_shape, make_rotary

if TYPE_CHECKING:
    from chairlift.kernels.cpu import _native

VALUES_AT_ONCE: Final = 1 << 20
"""Weights that are drawn; a larger matrix holds them several times."""

KV_BYTES: Final = 256 << 20
"""K and V that an attention pass goes through at most, if one layer does not take more."""

NORM_EPS: Final = 1e-5

LAYERS: Final = "layers"
"""The linear layers of all decoder layers together."""

Seconds = dict[str, float]
"""By kernel, of one pass."""


def unit_of(weight_format: str) -> str:
    """What products with matrices in this format compute with, see `ceilings.UNITS`."""
    if weight_format in FLOATS:
        return "fma"
    return "dot_u4s8" if weight_format.startswith("q4") else "dot_u8s8"


class LinearPass:
    """All linear layers of a model, one after the other.

    Args:
        native: the extension.
        format_of: the format of a layer's matrix.
        max_rows: rows of activations at most.
    """

    def __init__(
        self,
        native: NativeExtension,
        config: ModelConfig,
        format_of: Callable[[MatrixSpec], str],
        max_rows: int,
    ) -> None:
        self._native, self._kernels = native, native_kernels()
        self._generator = torch.Generator().manual_seed(0)
        self._drawn: dict[int, torch.Tensor] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._residual = torch.zeros(max_rows, config.hidden_size)
        self._max_rows = max_rows
        self._calls: list[tuple[ProductSpec, LinearKernel]] = []
        self._tapes: dict[int, _native.Tape] = {}
        self._row_work: defaultdict[str, Work] = defaultdict(Work)
        self._formats: defaultdict[str, set[str]] = defaultdict(set)
        products = [product for layer in config.layers for product in layer.products]
        for product in (*products, config.head_product):
            self._add(product, format_of(product.matrix))
        for product, kernel in self._calls:
            self._multiply(product, kernel, max_rows)  # no buffer moves after this, so a tape stays true

    def _add(self, product: ProductSpec, weight_format: str) -> None:
        spec, width = product.matrix, input_width(product)
        matrix = self._native.PackedMatrix(weight_format, spec.out_features, spec.in_features)
        values = self._weights(spec.in_features)
        for first in range(0, spec.out_features, len(values)):
            matrix.pack_floats(first, values[: spec.out_features - first].numpy())
        linear = self._kernels.make_linear(NativeMatrix(matrix, spec.kernel), None, _prologue(product))
        self._calls.append((product, linear))
        self._row_work[spec.kernel] += Work({unit_of(weight_format): 2.0 * spec.num_weights}, matrix.num_bytes)
        self._formats[spec.kernel].add(weight_format)
        if width not in self._inputs:
            self._inputs[width] = torch.randn((self._max_rows, width), generator=self._generator)

    def _weights(self, in_features: int) -> torch.Tensor:
        if in_features not in self._drawn:
            size = (max(1, VALUES_AT_ONCE // in_features), in_features)
            self._drawn[in_features] = torch.randn(size, generator=self._generator) * 0.02
        return self._drawn[in_features]

    def __call__(self, rows: int) -> Seconds:
        """Seconds by kernel, over all layers; of all layers as a step runs them: up to MAX_ROWS in one call."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for product, kernel in self._calls:
            start = perf_counter()
            self._multiply(product, kernel, rows)
            seconds[product.matrix.kernel] += perf_counter() - start
        layers = sum(seconds.values()) - seconds[LM_HEAD]
        return {LAYERS: self._time_tape(rows) if rows <= MAX_ROWS else layers, **seconds}

    def _multiply(self, product: ProductSpec, kernel: LinearKernel, rows: int) -> None:
        kernel(self._inputs[input_width(product)][:rows], self._residual[:rows] if product.adds_residual else None)

    def _time_tape(self, rows: int) -> float:
        if rows not in self._tapes:
            tape = self._native.Tape()
            with record_calls(tape):
                for product, kernel in self._calls:
                    if product.matrix.kernel != LM_HEAD:
                        self._multiply(product, kernel, rows)
            self._tapes[rows] = tape
        start = perf_counter()
        self._tapes[rows].replay(None, 0)
        return perf_counter() - start

    @property
    def kernels(self) -> list[str]:
        """LAYERS and each kernel."""
        return [LAYERS, *self._row_work]

    def formats_of(self, kernel: str) -> str:
        """The formats of a kernel's matrices."""
        return ", ".join(sorted(set().union(*(self._formats[name] for name in self._parts(kernel)))))

    def work(self, kernel: str, rows: int) -> Work:
        """Of one pass: every weight is read once."""
        total = sum((self._row_work[name] for name in self._parts(kernel)), Work())
        return Work({unit: rows * amount for unit, amount in total.operations.items()}, total.num_bytes)

    def _parts(self, kernel: str) -> list[str]:
        return [name for name in self._row_work if name != LM_HEAD] if kernel == LAYERS else [kernel]


def native_prologue(product: ProductSpec) -> str:
    """The product's prologue, or "none" where torch computes it: only the product is measured then."""
    kind = product.prologue
    return kind if kind in ("none", *NORM_KINDS) or has_native_kernel(kind) else "none"


def input_width(product: ProductSpec) -> int:
    """Values of a row before the prologue."""
    kind = native_prologue(product)
    is_gated = kind not in ("none", *NORM_KINDS) and find_activation(kind)[1]
    return product.matrix.in_features * (2 if is_gated else 1)


def _prologue(product: ProductSpec) -> Prologue:
    kind, size = native_prologue(product), product.matrix.in_features
    if kind == "none":
        return NO_PROLOGUE
    if kind not in NORM_KINDS:
        return Prologue(kind)
    return Prologue(kind, torch.ones(size), torch.zeros(size) if kind == "layer_norm" else None, NORM_EPS)


class AttentionPass:
    """Norm, rotation, KV writes and attention of layer after layer: `num_seqs` sequences that end at position `context`
    and compute their last `num_queries` tokens. Blocks lie anywhere in KV memory.

    Args:
        kv_dtype: of K and V.
        block_size: slots a block.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        kv_dtype: torch.dtype,
        block_size: int,
        num_seqs: int,
        num_queries: int,
        context: int,
    ) -> None:
        self.kernel = "decode" if num_queries == 1 else "prefill"
        self._context, self._num_queries, self._num_seqs = context, num_queries, num_seqs
        specs = [layer.attention for layer in config.layers]
        blocks = num_seqs * -(-context // block_size)
        layer_bytes = blocks * block_size * max(_token_bytes(spec, kv_dtype) for spec in specs)
        self.num_layers = min(config.num_layers, max(1, KV_BYTES // layer_bytes))
        self._specs = specs[: self.num_layers]
        self._kv_dtype = kv_dtype
        generator = torch.Generator().manual_seed(0)
        metadata = _metadata(num_seqs, num_queries, context, block_size)
        positions = torch.arange(context - num_queries, context).repeat(num_seqs)
        backends: dict[AttentionShape, tuple[NativeAttention, NativePlan, torch.Tensor]] = {}
        rotations = {key: make_rotary(*key, context, torch.device("cpu")).at(positions) for key in config.ropes}
        self._calls: list[Callable[[], torch.Tensor]] = []
        for spec in self._specs:
            shape = attention_shape(spec, torch.float32, torch.device("cpu"), kv_dtype)
            if shape not in backends:
                qkv = torch.randn((len(positions), spec.qkv.out_features), generator=generator)
                backend = NativeAttention(shape)
                backends[shape] = backend, backend.plan(metadata), qkv
            backend, plan, qkv = backends[shape]
            rotation = None if spec.rope is None else rotations[spec.rope, spec.head_dim]
            cache = _filled_cache(backend, blocks, block_size, generator)
            self._calls.append(partial(backend.forward, qkv, rotation, cache, plan, spec.sliding_window, None))

    def __call__(self) -> Seconds:
        """Seconds a layer."""
        start = perf_counter()
        for call in self._calls:
            call()
        return {self.kernel: (perf_counter() - start) / self.num_layers}

    def work(self) -> Work:
        """Of a layer: every key that a sequence sees is read once; two products of a query with each that it sees."""
        products = read = 0
        for spec in self._specs:
            window = spec.sliding_window or self._context
            products += 4 * spec.query_size * self._seen(window)
            read += min(self._context, window + self._num_queries - 1) * _token_bytes(spec, self._kv_dtype)
        num_seqs, num_layers = self._num_seqs, self.num_layers
        return Work({"fma": num_seqs * products / num_layers}, num_seqs * read / num_layers)

    def _seen(self, window: int) -> int:
        """Pairs of a query and a key that it sees, of one sequence."""
        positions = range(self._context - self._num_queries, self._context)
        return sum(min(position + 1, window) for position in positions)


def _token_bytes(spec: AttentionSpec, kv_dtype: torch.dtype) -> int:
    """K and V of one token and layer, scales included."""
    scale = 4 if kv_dtype == torch.int8 else 0
    return 2 * spec.num_kv_heads * (spec.head_dim * kv_dtype.itemsize + scale)


def _filled_cache(backend: NativeAttention, num_blocks: int, block_size: int, generator: torch.Generator) -> KVCache:
    cache = backend.allocate(num_blocks, block_size)
    for kept in cache:
        if kept is not None:
            kept.copy_(torch.randn(kept.shape[1:], generator=generator) * (40 if kept.dtype == torch.int8 else 1))
    return cache


def _metadata(num_seqs: int, num_queries: int, context: int, block_size: int) -> AttentionMetadata:
    per_seq = -(-context // block_size)
    order = list(range(num_seqs * per_seq))
    random.Random(0).shuffle(order)
    tables = torch.tensor(order, dtype=torch.int32).view(num_seqs, per_seq)
    positions = torch.arange(context - num_queries, context)
    slots = tables[:, positions // block_size].long() * block_size + positions % block_size
    starts = list(range(0, num_seqs * num_queries + 1, num_queries))
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.full((num_seqs,), context, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=slots.flatten(),
        query_start_loc_host=starts,
        seq_lens_host=[context] * num_seqs,
        block_size=block_size,
    )


class SamplingPass:
    """A token a row, out of random logits: the likeliest ("greedy"), or one drawn with temperature, top_k and top_p."""

    RANDOM: Final[Mapping[str, float]] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}

    def __init__(self, vocab_size: int, num_rows: int, *, is_random: bool) -> None:
        self.kernel = "random" if is_random else "greedy"
        self._rows = np.arange(num_rows)
        self._sample = NativeSampling().make_sampler(
            SamplingParameters(
                is_random=np.full(num_rows, is_random, np.uint8),
                temperature=np.full(num_rows, self.RANDOM["temperature"], np.float32),
                top_k=np.full(num_rows, min(self.RANDOM["top_k"], vocab_size - 1), np.int64),
                top_p=np.full(num_rows, self.RANDOM["top_p"], np.float64),
                min_p=np.zeros(num_rows, np.float32),
                keys=np.arange(num_rows, dtype=np.uint64),
                positions=np.full(num_rows, 128, np.int64),
            )
        )
        self._logits = torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(0)) * 4

    def __call__(self) -> Seconds:
        """Seconds of one batch."""
        start = perf_counter()
        self._sample(self._logits, self._rows)
        return {self.kernel: perf_counter() - start}

    def work(self) -> Work:
        """Every logit is read once."""
        return Work(num_bytes=4.0 * self._logits.numel(), in_cache=True)
