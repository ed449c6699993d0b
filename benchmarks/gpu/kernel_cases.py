"""The kernels of a model as cases: each runs with any kernel set on the same random arguments, and knows its work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
import torch
from benchmarks.attention_steps import AttentionCase, attention_metadata
from benchmarks.products import Product, head_product, layer_products

from chairlift.kernels.activations import find_activation
from chairlift.kernels.attention import AttentionBackend, AttentionShape, RotaryStep
from chairlift.kernels.interface import NO_PROLOGUE, NORM_KINDS, Kernels, Prologue
from chairlift.kernels.recurrence import StateStep
from chairlift.kernels.sampling import SamplingKernels, SamplingParameters
from chairlift.kernels.weights import PackedRows, Weights
from chairlift.lab.sim.model_shape import ExpertCost
from chairlift.models.declaration.attention_spec import AttentionSpec
from chairlift.models.declaration.layer_spec import LayerSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.layer_builder import LayerBuilder
from chairlift.models.layers import attention_shape
from chairlift.models.random_weights import RandomWeights
from chairlift.models.rotary import rotary_table
from chairlift.worker.torch_sampling import TorchSampling

BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call of a kernel that may be repeated.

    Attributes:
        overwritten: the arguments whose values are lost, and their values.
    """

    call: Callable[[], torch.Tensor]
    overwritten: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    def restore(self) -> None:
        """Give the arguments their values again."""
        for argument, values in self.overwritten:
            argument.copy_(values)

    def result(self) -> torch.Tensor:
        self.restore()
        return self.call()


@dataclass(frozen=True, slots=True)
class CaseSizes:
    """The sizes of the cases.

    Attributes:
        rows: numbers of tokens of products and row kernels.
        num_seqs, context: a decode step.
        chunk: tokens of a chunk of a prompt, at the end of a context of this length.
    """

    rows: tuple[int, ...] = (64, 512)
    num_seqs: int = 64
    context: int = 2048
    chunk: int = 512


SMALL_SIZES: Final = CaseSizes((3,), 3, 40, 6)


class ModelKernels:
    """A kernel set with the random weights of a model, and random arguments that are equal for all sets.

    Args:
        dtype: the type of activations and weights. Random values are those of `drawn_dtype`.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        sampling: SamplingKernels | None,
        dtype: torch.dtype,
        drawn_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config, self.kernels, self.dtype, self.device = config, kernels, dtype, device
        self.sampling: SamplingKernels = sampling or TorchSampling()
        self._drawn_dtype = drawn_dtype
        self._backends: dict[AttentionShape, AttentionBackend[Any]] = {}
        for spec in config.attention_specs.values():
            shape = self.shape(spec)
            if shape not in self._backends:
                self._backends[shape] = kernels.attention(shape)
        weights = _ConvertedWeights(RandomWeights(config, drawn_dtype, device), dtype, device)
        self.layers = LayerBuilder(config, weights, kernels, self._backends)

    def shape(self, spec: AttentionSpec) -> AttentionShape:
        return attention_shape(spec, self.dtype, self.device, self.dtype)

    def backend(self, spec: AttentionSpec) -> AttentionBackend[Any]:
        return self._backends[self.shape(spec)]

    def random(self, *size: int, seed: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal random values."""
        drawn = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(self._drawn_dtype)
        return drawn.to(self.device, dtype or self.dtype)

    def norm_weight(self, size: int) -> torch.Tensor:
        """Random values around 1."""
        drawn = 1 + torch.randn(size, generator=torch.Generator().manual_seed(1)) / 8
        return drawn.to(self._drawn_dtype).to(self.device, self.dtype)

    def fill(self, memory: torch.Tensor, seed: int) -> None:
        """Fill a memory of blocks with random values, which differ between blocks."""
        draw = torch.Generator().manual_seed(seed)
        block = torch.randn(memory.shape[1:], generator=draw).to(self.device)
        factors = torch.randn(len(memory), generator=draw).to(self.device).view(-1, *[1] * block.dim())
        memory.copy_((block * factors).to(self._drawn_dtype))

    def prologue(self, product: Product) -> Prologue:
        kind, size = product.prologue, product.matrix.in_features
        if kind not in NORM_KINDS:
            return NO_PROLOGUE if kind == "none" else Prologue(kind)
        bias = self.random(size, seed=2) if kind == "layer_norm" else None
        return Prologue(kind, self.norm_weight(size), bias, 1e-5)


@dataclass(slots=True)
class _ConvertedWeights:
    """The same random weights in the type of the definition."""

    weights: Weights
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.weights.tensor(name, shape).to(self.dtype)

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows:
        return self.weights.packed(name, shape)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A call of a kernel.

    Attributes:
        size: its size in words.
        num_bytes, num_flops: the least work of the call.
        make: returns the call of a kernel set.
    """

    name: str
    size: str
    num_bytes: float
    num_flops: float
    make: Callable[[ModelKernels], KernelCall]


def model_cases(config: ModelConfig, sizes: CaseSizes, value_bytes: int) -> Iterator[KernelCase]:
    """The cases of a model: the kernels of each kind of layer, and those of the head.

    Args:
        value_bytes: bytes of a value of activations, weights, K and V.
    """
    for layer in _kinds_of_layers(config):
        for rows in sizes.rows:
            yield from (product_case(product, rows, value_bytes) for product in layer_products(layer))
            yield from _mixture_cases(layer, rows, value_bytes)
        yield from _attention_cases(layer, config, sizes, value_bytes)
        yield from _recurrence_cases(layer, sizes)
    for rows in sizes.rows:
        yield norm_case(config.hidden_size, rows, value_bytes)
    yield product_case(head_product(config), sizes.num_seqs, value_bytes)
    yield sampler_case(config.vocab_size, sizes.num_seqs)


def _kinds_of_layers(config: ModelConfig) -> list[LayerSpec]:
    """The first layer of each kind: of each shape of attention, network and recurrence."""
    kinds: dict[tuple[Any, ...], LayerSpec] = {}
    for layer in config.layers:
        matrices = tuple((matrix.kernel, matrix.in_features, matrix.out_features) for matrix in layer.matrices)
        window = None if layer.attention is None else layer.attention.sliding_window
        kinds.setdefault((matrices, window), layer)
    return list(kinds.values())


def product_case(product: Product, rows: int, value_bytes: int) -> KernelCase:
    """A product with its prologue, and the residual if it adds one."""
    spec = product.matrix
    is_gated = product.prologue not in ("none", *NORM_KINDS) and find_activation(product.prologue)[1]
    width = spec.in_features * (2 if is_gated else 1)

    def make(model: ModelKernels) -> KernelCall:
        linear = model.layers.linear(spec, model.prologue(product))
        x = model.random(rows, width)
        if not product.adds_residual:
            return KernelCall(lambda: linear(x, None))
        values = model.random(rows, spec.out_features, seed=3)
        residual = values.clone()
        return KernelCall(lambda: linear(x, residual), ((residual, values),))

    values = spec.num_weights + rows * (width + spec.out_features * (2 if product.adds_residual else 1))
    return KernelCase(spec.kernel, f"{rows} rows", values * value_bytes, 2.0 * rows * spec.num_weights, make)


def norm_case(hidden_size: int, rows: int, value_bytes: int) -> KernelCase:
    """The sum of the residual stream and a branch, and its norm."""

    def make(model: ModelKernels) -> KernelCall:
        norm = Prologue("rms_norm", model.norm_weight(hidden_size), None, 1e-5)
        add = model.kernels.make_residual_sum(NO_PROLOGUE, norm, 1.0, 1.0)
        values = [model.random(rows, hidden_size, seed=seed) for seed in (3, 4)]
        stream, branch = (each.clone() for each in values)
        return KernelCall(lambda: add(stream, branch), ((stream, values[0]), (branch, values[1])))

    return KernelCase("sum and norm", f"{rows} rows", 3.0 * rows * hidden_size * value_bytes, 0.0, make)


def _attention_cases(layer: LayerSpec, config: ModelConfig, sizes: CaseSizes, value_bytes: int) -> Iterator[KernelCase]:
    spec = layer.attention
    if spec is None or spec.kv_source is not None:
        return
    rope_context = min(sizes.context, config.max_position_embeddings)
    yield attention_case("decode", spec, AttentionCase(sizes.num_seqs, 1, rope_context), value_bytes)
    yield attention_case("chunk", spec, AttentionCase(1, min(sizes.chunk, rope_context), rope_context), value_bytes)


def attention_case(kind: str, spec: AttentionSpec, case: AttentionCase, value_bytes: int) -> KernelCase:
    """Norms of heads, rotation, the write of K and V, and attention."""
    num_seqs, num_queries, context, _ = case
    num_blocks = num_seqs * -(-context // BLOCK_SIZE)
    num_rows = num_seqs * num_queries

    def make(model: ModelKernels) -> KernelCall:
        backend = model.backend(spec)
        metadata = attention_metadata(case, BLOCK_SIZE)
        moved: dict[str, Any] = {
            each.name: value.to(model.device)
            for each in fields(metadata)
            if isinstance(value := getattr(metadata, each.name), torch.Tensor)
        }
        plan = backend.plan(replace(metadata, **moved))
        cache = backend.allocate(num_blocks, BLOCK_SIZE)
        for seed, kept in enumerate(cache[:2]):
            assert isinstance(kept, torch.Tensor)
            model.fill(kept, seed)
        positions = torch.arange(context - num_queries, context).repeat(num_seqs).to(model.device)
        rotation = None
        if spec.rope is not None:
            rotation = RotaryStep(positions, rotary_table(spec.rope, spec.head_dim, context, model.device))
        values, norm = model.random(num_rows, spec.row_size), model.layers.head_norm(spec)
        sinks = None if spec.sinks is None else model.random(spec.num_heads, seed=4)
        arguments = (rotation, cache, plan, spec.sliding_window, norm, sinks)
        qkv = values.clone()
        return KernelCall(lambda: backend.forward(qkv, *arguments), ((qkv, values),))

    window = spec.sliding_window or context
    num_pairs = num_seqs * sum(min(position + 1, window) for position in range(context - num_queries, context))
    num_keys = num_seqs * min(context, window + num_queries - 1)
    values = num_keys * spec.num_kept_memories * spec.key_size + num_rows * (spec.row_size + spec.query_size)
    name = f"attention, {kind}" + ("" if spec.sliding_window is None else f", window {spec.sliding_window}")
    size = f"{num_seqs} x {num_queries} at {context}"
    return KernelCase(name, size, values * value_bytes, 4.0 * num_pairs * spec.query_size, make)


def _mixture_cases(layer: LayerSpec, rows: int, value_bytes: int) -> Iterator[KernelCase]:
    network, cost = layer.mixture, ExpertCost.from_layer(layer)
    if network is None or cost is None or network.latent is not None:
        return
    width = network.up.in_features

    def make(model: ModelKernels) -> KernelCall:
        mixture = model.layers.mixture(network, None)
        x = model.random(rows, width)
        return KernelCall(lambda: mixture(x))

    values = cost.num_read(rows) * cost.num_weights + 2 * rows * width
    flops = 2.0 * rows * cost.experts_per_token * cost.num_weights
    yield KernelCase("mixture of experts", f"{rows} rows", values * value_bytes, flops, make)


def _recurrence_cases(layer: LayerSpec, sizes: CaseSizes) -> Iterator[KernelCase]:
    """A decode step, and a chunk of one sequence, with states in float32."""
    spec = layer.recurrence
    if spec is None:
        return

    def make(model: ModelKernels, num_seqs: int, num_rows: int) -> KernelCall:
        kernel = model.layers.recurrence(spec)
        state = kernel.allocate(num_seqs)
        ids = torch.arange(num_seqs, dtype=torch.int32, device=model.device)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=model.device) * (num_rows // num_seqs)
        snapshots = torch.empty((0, 3), dtype=torch.int32, device=model.device)
        step, values = StateStep(starts, ids, ids, snapshots), model.random(num_rows, spec.input.out_features)
        x, zeros = values.clone(), [None if each is None else each.clone() for each in state]
        states = [
            (each, zero) for each, zero in zip(state, zeros, strict=True) if each is not None and zero is not None
        ]
        return KernelCall(lambda: kernel(x, state, step), ((x, values), *states))

    for kind, num_seqs, num_rows in (("decode", sizes.num_seqs, sizes.num_seqs), ("chunk", 1, sizes.chunk)):
        num_bytes = 8.0 * num_seqs * spec.state_values
        yield KernelCase(
            f"recurrence, {kind}",
            f"{num_seqs} x {num_rows // num_seqs}",
            num_bytes,
            0.0,
            lambda model, count=num_seqs, rows=num_rows: make(model, count, rows),  # type: ignore[misc]
        )


def sampler_case(vocab_size: int, rows: int) -> KernelCase:
    """Draws with a temperature for odd rows, and the likeliest tokens for even ones."""

    def make(model: ModelKernels) -> KernelCall:
        index = np.arange(rows)
        parameters = SamplingParameters(
            is_random=(index % 2).astype(np.uint8),
            temperature=np.full(rows, 0.8, np.float32),
            top_k=np.zeros(rows, np.int64),
            top_p=np.full(rows, 0.95),
            min_p=np.zeros(rows, np.float32),
            keys=index.astype(np.uint64) + np.uint64(7),
            positions=index,
        )
        sample = model.sampling.make_sampler(parameters)
        values = 4 * model.random(rows, vocab_size, dtype=torch.float32)
        logits = values.clone()
        return KernelCall(lambda: sample(logits, index), ((logits, values),))

    return KernelCase("sampler", f"{rows} rows", 4.0 * rows * vocab_size, 0.0, make)
