"""Kernels in the order and over the memory of a real step, timed one by one.

A pass goes through all layers of the model, so weights and K and V come from memory as they do in a step, and not from
a cache that the call before filled. Weights and activations are normal random numbers: the products take the same time
whatever their values, but for outliers, of which a model has more.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from chairlift.bench.ceilings import Work
from chairlift.bench.linear_layers import LM_HEAD, LinearLayer, layer_linears, lm_head
from chairlift.kernels.attention import AttentionMetadata
from chairlift.kernels.backend import AttentionShape, RotaryStep
from chairlift.kernels.cpu.attention import NativeAttention
from chairlift.kernels.cpu.formats import FLOATS
from chairlift.kernels.cpu.kernel_set import NativeMatrix, native_kernels
from chairlift.kernels.cpu.native_extension import NativeExtension
from chairlift.kernels.cpu.sampling import NativeSampling
from chairlift.kernels.cpu.tape import MAX_ROWS, record_calls
from chairlift.kernels.linear import LinearKernel, Prologue
from chairlift.kernels.sampling import SamplingParameters
from chairlift.models.config import ModelConfig
from chairlift.models.model import make_rotary

if TYPE_CHECKING:
    from chairlift.kernels.cpu import _native

VALUES_AT_ONCE: Final = 1 << 20
"""Weights that are drawn; a larger matrix holds them several times."""

KV_BYTES: Final = 256 << 20
"""K and V that an attention pass goes through at most, if one layer does not take more."""

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
        self, native: NativeExtension, config: ModelConfig, format_of: Callable[[LinearLayer], str], max_rows: int
    ) -> None:
        self._native, self._kernels = native, native_kernels()
        self._generator = torch.Generator().manual_seed(0)
        self._drawn: dict[int, torch.Tensor] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._residual = torch.zeros(max_rows, config.hidden_size)
        self._max_rows = max_rows
        self._calls: list[tuple[LinearLayer, LinearKernel]] = []
        self._tapes: dict[int, _native.Tape] = {}
        self._row_work: defaultdict[str, Work] = defaultdict(Work)
        self._formats: defaultdict[str, set[str]] = defaultdict(set)
        layers = [layer for index in range(config.num_layers) for layer in layer_linears(config, index)]
        for layer in (*layers, lm_head(config)):
            self._add(layer, format_of(layer), config.norm_eps)
        for layer, kernel in self._calls:
            self._multiply(layer, kernel, max_rows)  # no buffer moves after this, so a tape stays true

    def _add(self, layer: LinearLayer, weight_format: str, eps: float) -> None:
        matrix = self._native.PackedMatrix(weight_format, layer.out_features, layer.in_features)
        values = self._weights(layer.in_features)
        for first in range(0, layer.out_features, len(values)):
            matrix.pack_floats(first, values[: layer.out_features - first].numpy())
        prologue = _prologue(layer, eps)
        self._calls.append((layer, self._kernels.make_linear(NativeMatrix(matrix, layer.kernel), None, prologue)))
        self._row_work[layer.kernel] += Work({unit_of(weight_format): 2.0 * layer.num_weights}, matrix.num_bytes)
        self._formats[layer.kernel].add(weight_format)
        if layer.input_width not in self._inputs:
            size = (self._max_rows, layer.input_width)
            self._inputs[layer.input_width] = torch.randn(size, generator=self._generator)

    def _weights(self, in_features: int) -> torch.Tensor:
        if in_features not in self._drawn:
            size = (max(1, VALUES_AT_ONCE // in_features), in_features)
            self._drawn[in_features] = torch.randn(size, generator=self._generator) * 0.02
        return self._drawn[in_features]

    def __call__(self, rows: int) -> Seconds:
        """Seconds by kernel, over all layers; of all layers as a step runs them: up to MAX_ROWS in one call."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for layer, kernel in self._calls:
            start = perf_counter()
            self._multiply(layer, kernel, rows)
            seconds[layer.kernel] += perf_counter() - start
        layers = sum(seconds.values()) - seconds[LM_HEAD]
        return {LAYERS: self._time_tape(rows) if rows <= MAX_ROWS else layers, **seconds}

    def _multiply(self, layer: LinearLayer, kernel: LinearKernel, rows: int) -> None:
        kernel(self._inputs[layer.input_width][:rows], self._residual[:rows] if layer.adds else None)

    def _time_tape(self, rows: int) -> float:
        if rows not in self._tapes:
            tape = self._native.Tape()
            with record_calls(tape):
                for layer, kernel in self._calls:
                    if layer.kernel != LM_HEAD:
                        self._multiply(layer, kernel, rows)
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


def _prologue(layer: LinearLayer, eps: float) -> Prologue:
    if layer.prologue not in ("rms_norm", "layer_norm"):
        return Prologue(layer.prologue)
    bias = torch.zeros(layer.in_features) if layer.prologue == "layer_norm" else None
    return Prologue(layer.prologue, torch.ones(layer.in_features), bias, eps)


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
        self._shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            dtype=torch.float32,
            device=torch.device("cpu"),
            kv_cache_dtype=kv_dtype,
        )
        self.kernel = "decode" if num_queries == 1 else "prefill"
        self._context, self._num_queries, self._num_seqs = context, num_queries, num_seqs
        self._backend = NativeAttention(self._shape)
        blocks = num_seqs * -(-context // block_size)
        layer_bytes = blocks * block_size * self._token_bytes()
        self.num_layers = min(config.num_layers, max(1, KV_BYTES // layer_bytes))
        self._windows = config.sliding_windows[: self.num_layers]
        generator = torch.Generator().manual_seed(0)
        self._caches = [self._backend.allocate(blocks, block_size) for _ in range(self.num_layers)]
        for cache in self._caches:
            for kept in cache:
                if kept is not None:
                    kept.copy_(
                        torch.randn(kept.shape[1:], generator=generator) * (40 if kept.dtype == torch.int8 else 1)
                    )
        metadata = _metadata(num_seqs, num_queries, context, block_size)
        self._plan = self._backend.plan(metadata)
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._qkv = torch.randn((num_seqs * num_queries, width), generator=generator)
        self._rotary = _rotary(config, torch.arange(context - num_queries, context).repeat(num_seqs), context)

    def _token_bytes(self) -> int:
        """K and V of one token and layer, scales included."""
        shape = self._shape
        scale = 4 if shape.kv_dtype == torch.int8 else 0
        return 2 * shape.num_kv_heads * (shape.head_dim * shape.kv_dtype.itemsize + scale)

    def __call__(self) -> Seconds:
        """Seconds a layer."""
        start = perf_counter()
        for cache, window in zip(self._caches, self._windows, strict=True):
            self._backend.forward(self._qkv, self._rotary, cache, self._plan, window, None)
        return {self.kernel: (perf_counter() - start) / self.num_layers}

    def work(self) -> Work:
        """Of a layer: every key that a sequence sees is read once; two products of a query with each that it sees."""
        seen = sum(self._seen(window) for window in self._windows) / self.num_layers
        read = sum(min(self._context, (window or self._context) + self._num_queries - 1) for window in self._windows)
        per_key = 4 * self._shape.num_heads * self._shape.head_dim
        return Work(
            {"fma": float(self._num_seqs * seen * per_key)},
            self._num_seqs * read / self.num_layers * self._token_bytes(),
        )

    def _seen(self, window: int | None) -> int:
        """Pairs of a query and a key that it sees, of one sequence."""
        positions = range(self._context - self._num_queries, self._context)
        return sum(min(position + 1, window or self._context) for position in positions)


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


def _rotary(config: ModelConfig, positions: torch.Tensor, max_positions: int) -> RotaryStep | None:
    if config.rope is None:
        return None
    return make_rotary(config.rope, config.head_dim, max_positions, torch.device("cpu")).at(positions)


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
