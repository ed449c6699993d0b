"""Passes over the layers of a model that time each kernel, in the order and with the memory traffic of a step.

A pass computes all layers of the model, so weights, K and V are read from memory as in a step, and not from a cache.
Activations are normal random numbers. So are weights, except in formats to which floats cannot be rounded, where they
are zero. The time of a product does not depend on its values except for outliers, of which a model has more.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from chairlift.errors import ConfigError
from chairlift.kernels.activations import NATIVE_PROLOGUES, find_activation
from chairlift.kernels.attention import AttentionMetadata, AttentionShape, KVCache, RotaryStep
from chairlift.kernels.cpu.attention import NativeAttention, NativeAttentionPlan
from chairlift.kernels.cpu.formats import EIGHT_BIT, ROUNDED
from chairlift.kernels.cpu.kernel_set import NativeMatrix, native_kernels
from chairlift.kernels.cpu.native_extension import NativeExtension
from chairlift.kernels.cpu.sampling import NativeSampling
from chairlift.kernels.cpu.tape import MAX_ROWS, record_calls
from chairlift.kernels.interface import NO_PROLOGUE, NORM_KINDS, LinearKernel, Prologue
from chairlift.kernels.recurrence import RecurrentKernel, RecurrentState, StateStep
from chairlift.kernels.sampling import SamplingParameters
from chairlift.kernels.weight_formats import FLOATS, ORDERED
from chairlift.lab.bench.kernels.ceilings import KernelWork
from chairlift.models.declaration import LM_HEAD, AttentionSpec, MatrixSpec, ModelConfig, ProductSpec
from chairlift.models.layers import LayerBuilder, attention_shape
from chairlift.models.random_weights import RandomWeights
from chairlift.models.rotary import rotary_table

if TYPE_CHECKING:
    from chairlift.kernels.cpu import _native

VALUES_AT_ONCE: Final = 1 << 20
"""Number of random weights that are drawn. A larger matrix repeats them."""

KV_BYTES: Final = 256 << 20
"""Maximum size of K and V of an attention pass, unless one layer needs more."""

STATE_BYTES: Final = 256 << 20
"""Maximum size of the states of a recurrence pass, unless one layer needs more."""

NORM_EPS: Final = 1e-5

ISA_UNITS: Final = {"amx": {"int8": "tile_s8", "bf16": "tile_bf16"}, "avx512-bf16": {"bf16": "dot_bf16"}}
"""The operations of products that an instruction set has instructions for, by instruction set and format."""

LAYERS: Final = "layers"
"""Name of the linear layers of all decoder layers together."""

Seconds = dict[str, float]
"""The seconds of one pass by kernel."""


def unit_of(weight_format: str, isa: str) -> str:
    """The operation of products with matrices in this format, one of `ceilings.UNITS`."""
    if unit := ISA_UNITS.get(isa, {}).get(weight_format):
        return unit
    if weight_format in (*FLOATS, "f8_e4m3"):
        return "fma"
    return "dot_u8s8" if weight_format in EIGHT_BIT else "dot_u7s8"


class LinearPass:
    """A pass over all linear layers of a model.

    Args:
        native: the native extension.
        parts_of: returns (format, out_features) of the native matrices of a product.
        max_rows: maximum number of rows of activations.
    """

    def __init__(
        self,
        native: NativeExtension,
        config: ModelConfig,
        parts_of: Callable[[MatrixSpec], list[tuple[str, int]]],
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
        self._row_work: defaultdict[str, KernelWork] = defaultdict(KernelWork)
        self._formats: defaultdict[str, set[str]] = defaultdict(set)
        products = [product for layer in config.layers for product in layer.products]
        for product in (*products, config.head_product):
            self._add(product, parts_of(product.matrix))
        for product, kernel in self._calls:
            self._multiply(product, kernel, max_rows)  # buffers do not move afterwards, so a tape stays valid

    def _add(self, product: ProductSpec, parts: list[tuple[str, int]]) -> None:
        spec, width = product.matrix, input_width(product)
        matrices = tuple(self._make_matrix(weight_format, out, spec.in_features) for weight_format, out in parts)
        linear = self._kernels.make_linear(NativeMatrix(matrices, spec.kernel), None, _prologue(product))
        self._calls.append((product, linear))
        for matrix in matrices:
            operations = {unit_of(matrix.format, self._native.isa()): 2.0 * matrix.out_features * spec.in_features}
            self._row_work[spec.kernel] += KernelWork(operations, matrix.num_bytes)
            self._formats[spec.kernel].add(matrix.format)
        if width not in self._inputs:
            self._inputs[width] = torch.randn((self._max_rows, width), generator=self._generator)

    def _make_matrix(self, weight_format: str, out_features: int, in_features: int) -> _native.PackedMatrix:
        try:
            matrix = self._native.PackedMatrix(weight_format.removesuffix(ORDERED), out_features, in_features)
        except ValueError as error:
            raise ConfigError(f"formats has {weight_format!r}, which does not fit this model: {error}") from error
        if weight_format.endswith(ORDERED):
            matrix.set_input_order(torch.randperm(in_features, generator=self._generator).tolist())
        if weight_format in ROUNDED:
            values = self._weights(in_features)
            for first in range(0, out_features, len(values)):
                matrix.pack_floats(first, values[: out_features - first].numpy())
        return matrix

    def _weights(self, in_features: int) -> torch.Tensor:
        if in_features not in self._drawn:
            size = (max(1, VALUES_AT_ONCE // in_features), in_features)
            self._drawn[in_features] = torch.randn(size, generator=self._generator) * 0.02
        return self._drawn[in_features]

    def __call__(self, rows: int) -> Seconds:
        """Measure the seconds of each kernel over all layers, and of LAYERS as a step runs them: in one call with up to
        MAX_ROWS rows."""
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
        self._tapes[rows].replay([], 0)
        return perf_counter() - start

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels, with LAYERS."""
        return [LAYERS, *self._row_work]

    def formats_of(self, kernel: str) -> str:
        """The formats of the matrices of a kernel."""
        return ", ".join(sorted(set().union(*(self._formats[name] for name in self._parts(kernel)))))

    def work(self, kernel: str, rows: int) -> KernelWork:
        """The work of one pass, which reads every weight once."""
        total = sum((self._row_work[name] for name in self._parts(kernel)), KernelWork())
        return KernelWork({unit: rows * amount for unit, amount in total.operations.items()}, total.num_bytes)

    def _parts(self, kernel: str) -> list[str]:
        return [name for name in self._row_work if name != LM_HEAD] if kernel == LAYERS else [kernel]


def native_prologue(product: ProductSpec) -> str:
    """The norm or activation that the native kernel fuses with the product. "none" if torch computes it: then only the
    product is measured."""
    return product.prologue if product.prologue in NATIVE_PROLOGUES else "none"


def input_width(product: ProductSpec) -> int:
    """The number of values in a row before the prologue."""
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
    """A pass over norm, rotation, KV writes and attention of all layers, with blocks in random order.

    Args:
        kv_dtype: data type of K and V.
        block_size: slots in a block.
        num_seqs: number of sequences.
        num_queries: number of tokens that each sequence computes, its last ones.
        context: number of tokens of each sequence.
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
        specs = config.attention_specs
        blocks = num_seqs * -(-context // block_size)
        layer_bytes = blocks * block_size * max(_token_bytes(spec, kv_dtype) for spec in specs.values())
        self.num_layers = min(len(specs), max(1, KV_BYTES // layer_bytes))
        self._specs = list(specs.values())[: self.num_layers]
        self._kv_dtype = kv_dtype
        generator = torch.Generator().manual_seed(0)
        metadata = _metadata(num_seqs, num_queries, context, block_size)
        positions = torch.arange(context - num_queries, context).repeat(num_seqs)
        backends: dict[AttentionShape, tuple[NativeAttention, NativeAttentionPlan]] = {}
        inputs: dict[int, torch.Tensor] = {}
        caches: list[KVCache] = []
        cpu = torch.device("cpu")
        rotations = {key: RotaryStep(positions, rotary_table(*key, context, cpu)) for key in config.ropes}
        self._calls: list[Callable[[], torch.Tensor]] = []
        for spec in self._specs:
            shape = attention_shape(spec, torch.float32, cpu, kv_dtype)
            if shape not in backends:
                backend = NativeAttention(shape)
                backends[shape] = backend, backend.plan(metadata)
            backend, plan = backends[shape]
            width, source = spec.qkv.out_features, spec.kv_source
            if width not in inputs:
                inputs[width] = torch.randn((len(positions), width), generator=generator)
            rotation = None if spec.rope is None else rotations[spec.rope, spec.head_dim]
            caches.append(_filled_cache(backend, blocks, block_size, generator) if source is None else caches[source])
            call = partial(backend.forward, inputs[width], rotation, caches[-1], plan, spec.sliding_window, None)
            self._calls.append(call)

    def __call__(self) -> Seconds:
        """Measure the seconds of a layer."""
        start = perf_counter()
        for call in self._calls:
            call()
        return {self.kernel: (perf_counter() - start) / self.num_layers}

    def work(self, isa: str) -> KernelWork:
        """The mean work of a layer on an instruction set: reading every visible key and value once, and two products
        of a query with each."""
        unit = "fma" if self._kv_dtype == torch.float32 else ISA_UNITS.get(isa, {}).get("bf16", "fma")
        products = read = 0
        for spec in self._specs:
            window = spec.sliding_window or self._context
            products += 4 * spec.query_size * self._num_pairs(window)
            read += min(self._context, window + self._num_queries - 1) * _token_bytes(spec, self._kv_dtype)
        num_seqs, num_layers = self._num_seqs, self.num_layers
        return KernelWork({unit: num_seqs * products / num_layers}, num_seqs * read / num_layers)

    def _num_pairs(self, window: int) -> int:
        """The number of pairs of a query and a visible key in one sequence."""
        positions = range(self._context - self._num_queries, self._context)
        return sum(min(position + 1, window) for position in positions)


def _token_bytes(spec: AttentionSpec, kv_dtype: torch.dtype) -> int:
    """The bytes of K and V of one token in one layer, including scales."""
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


class RecurrencePass:
    """A pass over everything between the projections of all layers with recurrent state.

    Args:
        num_seqs: number of sequences.
        num_queries: number of tokens that each sequence computes.
    """

    def __init__(self, config: ModelConfig, *, num_seqs: int, num_queries: int) -> None:
        self.kernel = "decode" if num_queries == 1 else "prefill"
        self._num_seqs, self._num_tokens = num_seqs, num_seqs * num_queries
        specs = [layer.recurrence for layer in config.layers if layer.recurrence is not None]
        state_bytes = 4 * num_seqs * max(spec.state_values for spec in specs)
        self._specs = specs[: max(1, STATE_BYTES // state_bytes)]
        weights = RandomWeights(replace(config, quantization=None), torch.float32, torch.device("cpu"))
        builder = LayerBuilder(config, weights, native_kernels(), {})
        generator = torch.Generator().manual_seed(0)
        slots = torch.arange(num_seqs, dtype=torch.int32)
        starts = torch.arange(0, self._num_tokens + 1, num_queries, dtype=torch.int32)
        self._step = StateStep(starts, slots, slots, torch.empty((0, 3), dtype=torch.int32))
        self._layers: list[tuple[RecurrentKernel, RecurrentState, torch.Tensor]] = []
        inputs: dict[int, torch.Tensor] = {}
        for spec in self._specs:
            kernel, width = builder.recurrence(spec), spec.input.out_features
            state = kernel.allocate(num_seqs)
            for values in state:
                if values is not None:
                    values.copy_(torch.randn(values.shape[1:], generator=generator))
            if width not in inputs:
                inputs[width] = torch.randn((self._num_tokens, width), generator=generator)
            self._layers.append((kernel, state, inputs[width]))

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def __call__(self) -> Seconds:
        """Measure the seconds of a layer. Rows are copied before, because the kernels overwrite them."""
        seconds = 0.0
        for kernel, state, inputs in self._layers:
            rows = inputs.clone()
            start = perf_counter()
            kernel(rows, state, self._step)
            seconds += perf_counter() - start
        return {self.kernel: seconds / self.num_layers}

    def work(self) -> KernelWork:
        """The mean work of a layer: a product with the state for the output, its update, in the delta rule another
        product, and the convolution; and reading every state once."""
        operations = read = 0
        for spec in self._specs:
            convolution, rule = spec.convolution, spec.rule
            operations += 2 * convolution.width * convolution.channels
            if rule is not None:
                operations += (7 if spec.gated_delta else 5) * rule.num_kept_values
            read += 4 * spec.state_values
        tokens, num_layers = self._num_tokens, self.num_layers
        return KernelWork({"fma": tokens * operations / num_layers}, self._num_seqs * read / num_layers)


class SamplingPass:
    """A pass that samples one token for each row of random logits: greedy, or with temperature, top_k and top_p."""

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
        """Measure the seconds of one batch."""
        start = perf_counter()
        self._sample(self._logits, self._rows)
        return {self.kernel: perf_counter() - start}

    def work(self) -> KernelWork:
        """The work of one batch, which reads every logit once."""
        return KernelWork(num_bytes=4.0 * self._logits.numel(), in_cache=True)
