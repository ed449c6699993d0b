"""The native kernel set: float32 activations and matrices in the formats of `formats.py`.

Results are written into buffers that all steps share, because page faults of new tensors take longer than the products
that fill them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from chairlift.errors import ModelLoadError
from chairlift.kernels import torch_ops
from chairlift.kernels.activations import NATIVE_PROLOGUES, GateActivation
from chairlift.kernels.cpu import load, native
from chairlift.kernels.cpu.attention import NativeAttention
from chairlift.kernels.cpu.formats import packed_parts
from chairlift.kernels.cpu.recurrence import NativeRecurrence, NativeStates
from chairlift.kernels.cpu.repacking import RepackingLoss, is_exact, pack, repacking_notes
from chairlift.kernels.cpu.row_buffers import RowBuffers, rows_of
from chairlift.kernels.cpu.tape import RecordedLayers
from chairlift.kernels.grouped_mixture import GroupedMixture
from chairlift.kernels.interface import (
    NO_PROLOGUE,
    ComposedLinear,
    FeedForwardKernel,
    Kernels,
    LinearKernel,
    LoadedMatrix,
    Mixture,
    MixtureKernel,
    Prologue,
    call_each,
    compose_feed_forward,
)
from chairlift.kernels.lora import AdaptedLinear, LoraBatch, LoraLayer
from chairlift.kernels.weight_formats import ORDERED
from chairlift.kernels.weights import FloatArray, IntArray, MatrixParts, PackedRows, Weights

if TYPE_CHECKING:
    from chairlift.kernels.cpu import _native


def native_kernels(quantization: str | None = None) -> Kernels:
    """The native kernel set for one model, with its own buffers.

    Args:
        quantization: the format of all matrices; None for the format of each matrix in the file, or
            q8_0 if it has no native form.

    Raises:
        KernelsUnavailableError: the extension cannot be loaded.
    """
    load()
    maker = _KernelMaker()
    return Kernels(
        name="native",
        load_matrix=partial(maker.loader.load, quantization=quantization),
        load_router=maker.loader.load,
        make_embedding=partial(NativeEmbedding, buffers=maker.buffers),
        make_linear=maker.make_linear,
        add_lora=maker.add_lora,
        make_feed_forward=make_feed_forward,
        call_each=native_call_each,
        make_residual_sum=NativeResidualSum,
        make_mixture=maker.make_mixture,
        make_recurrence=partial(NativeRecurrence, buffers=maker.buffers, states=maker.states),
        gate=native_gate,
        new_rows=maker.new_rows,
        attention=NativeAttention,
        notes=maker.loader.notes,
        run_layers=RecordedLayers(maker.buffers, maker.states),
    )


class _KernelMaker:
    """Makes the kernels of one model, which share matrices, buffers and states."""

    def __init__(self) -> None:
        self.loader, self.buffers, self.states = MatrixLoader(), RowBuffers(), NativeStates()
        self._expert_buffers = RowBuffers()
        self._batches: dict[LoraBatch, _native.LoraBatch] = {}

    def make_linear(
        self, matrix: NativeMatrix, bias: torch.Tensor | None, prologue: Prologue, buffers: RowBuffers | None = None
    ) -> LinearKernel:
        buffers = buffers or self.buffers
        if prologue.kind in NATIVE_PROLOGUES:
            return NativeLinear(matrix, bias, prologue, buffers)
        product = NativeLinear(matrix, bias, NO_PROLOGUE, buffers)
        return ComposedLinear(torch_ops.make_prologue(prologue), product)

    def new_rows(self, x: torch.Tensor, purpose: str, width: int) -> torch.Tensor:
        return self.buffers.rows((purpose, width), len(x))

    def add_lora(self, base: NativeLinear, prologue: Prologue, layer: LoraLayer) -> LinearKernel:
        if prologue.kind not in NATIVE_PROLOGUES:
            return AdaptedLinear(base, torch_ops.make_prologue(prologue), layer)
        if layer.batch not in self._batches:
            batch = self._batches[layer.batch] = native.LoraBatch()
            layer.batch.observe(lambda slots: batch.set_slots(slots.ctypes.data, len(slots)))
        return NativeAdaptedLinear(base, layer, self._batches[layer.batch])

    def make_mixture(self, mixture: Mixture) -> MixtureKernel:
        if mixture.activation in NATIVE_PROLOGUES:
            return NativeMixture(mixture, self.buffers)
        # The result of a dense network beside the experts is in the other buffers.
        make_linear = partial(self.make_linear, buffers=self._expert_buffers)
        return GroupedMixture(mixture, make_linear, torch_ops.make_prologue)


def make_feed_forward(up: LinearKernel, down: LinearKernel) -> FeedForwardKernel:
    """Both layers in one native call if the extension can compute them so."""
    if isinstance(up, NativeLinear) and isinstance(down, NativeLinear) and up.kernel.can_feed(down.kernel):
        return partial(NativeLinear.feed, up, down)
    return compose_feed_forward(up, down)


def native_call_each(layers: Sequence[LinearKernel], xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    """Write layer(x) of each layer to its `out`, in one native call if all layers are native."""
    kernels = [layer.kernel for layer in layers if isinstance(layer, NativeLinear)]
    if len(kernels) < len(layers):
        call_each(layers, xs, outs)
    else:
        native.multiply_each(kernels, [rows_of(x) for x in xs], [rows_of(out) for out in outs], len(xs[0]))


@dataclass(frozen=True, slots=True, eq=False)
class NativeMatrix:
    """Packed matrices with the same input that are multiplied as one.

    Attributes:
        parts: the matrices in the order of their outputs, one for each run of rows in the same format.
        purpose: the last component of the name of the first matrix of the file ("q_proj").
    """

    parts: tuple[_native.PackedMatrix, ...]
    purpose: str

    @property
    def out_features(self) -> int:
        """The number of outputs of all parts."""
        return sum(part.out_features for part in self.parts)


class MatrixLoader:
    """Packs matrices part by part, so that no complete matrix is in memory twice."""

    def __init__(self) -> None:
        self._losses: defaultdict[tuple[str, str], RepackingLoss] = defaultdict(RepackingLoss)

    def load(
        self, weights: Weights, parts: MatrixParts, in_features: int, quantization: str | None = None
    ) -> NativeMatrix:
        """Pack matrices with the same input; implements `Kernels.load_matrix`.

        Args:
            quantization: the format of all matrices; None for the format of each matrix in the file.
        """
        rows = [weights.packed(f"{name}.weight", (out, in_features)) for name, out in parts]
        found = [(part.format, out) for part, (_, out) in zip(rows, parts, strict=True)]
        targets = packed_parts(found, quantization)
        if any(target.endswith(ORDERED) for target, _ in targets):
            _check_orders(parts, rows)
        matrices = [native.PackedMatrix(target.removesuffix(ORDERED), out, in_features) for target, out in targets]
        remaining = iter(matrices)
        matrix, first_row = next(remaining), 0
        for part in rows:
            if first_row == matrix.out_features:
                matrix, first_row = next(remaining), 0
            pack(matrix, first_row, part)
            if not is_exact(part.format, matrix.format):
                self._losses[part.format, matrix.format].add(matrix, first_row, part)
            first_row += len(part.rows)
        return NativeMatrix(tuple(matrices), parts[0][0].rpartition(".")[2])

    def notes(self) -> list[str]:
        """Lines to log about the error of repacking."""
        return repacking_notes(sorted(self._losses.items()))


def _check_orders(parts: MatrixParts, rows: Sequence[PackedRows]) -> None:
    """Raise unless all matrices have the same order of inputs, because a layer reads its inputs once."""
    for (name, _), part in zip(parts[1:], rows[1:], strict=True):
        if not np.array_equal(_order(part), _order(rows[0])):
            raise ModelLoadError(
                f"{name}.g_idx has another order of inputs than {parts[0][0]}.g_idx, and both matrices are multiplied "
                "as one: use --kernels torch, or a checkpoint without act-order (desc_act: false)"
            )


def _order(part: PackedRows) -> IntArray:
    return np.arange(part.in_features, dtype=np.int32) if part.input_order is None else part.input_order


class NativeEmbedding:
    """Copies rows of a matrix by id."""

    def __init__(self, matrix: NativeMatrix, buffers: RowBuffers) -> None:
        (self._matrix,) = matrix.parts
        # An LM head that shares the matrix reads these rows while it writes its own, which may have the same width.
        self._key = (f"rows of {matrix.purpose}", self._matrix.in_features)
        self._buffers = buffers

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        assert ids.dtype == torch.int64, "the kernel reads 64-bit ids"
        out = self._buffers.rows(self._key, len(ids))
        self._matrix.gather(ids.contiguous().data_ptr(), len(ids), out.data_ptr())
        return out


class NativeLinear:
    """A `LinearKernel` that computes the sum with a residual in the memory of the residual.

    Attributes:
        kernel: the layer in the extension.
        num_bytes: the size of bias and norm, which the extension copies.
    """

    def __init__(
        self,
        matrix: NativeMatrix,
        bias: torch.Tensor | None,
        prologue: Prologue,
        buffers: RowBuffers,
    ) -> None:
        vectors = [_vector(values) for values in (bias, prologue.weight, prologue.bias)]
        bias_array, norm_weight, norm_bias = vectors
        self._matrix = matrix
        self.kernel = native.FusedLinear(
            list(matrix.parts),
            bias_array,
            prologue.kind,
            norm_weight,
            norm_bias,
            prologue.eps,
            prologue.parameters,
        )
        self._key = (matrix.purpose, matrix.out_features)
        self._buffers = buffers
        self.num_bytes = _num_bytes(*vectors)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        num_rows = x.shape[0]
        if out is None:
            out = self._buffers.rows(self._key, num_rows) if residual is None else residual
        assert out.data_ptr() != x.data_ptr(), "x and the result must not share memory"
        self.kernel(*rows_of(x), num_rows, *rows_of(out), residual is not None)
        return out

    def feed(self, down: NativeLinear, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """down(self(x)), plus `residual`. The values between the layers are those after the prologue of `down`."""
        num_rows, (purpose, width) = x.shape[0], self._key
        inner = self._buffers.rows((purpose, width // 2), num_rows)
        out = self._buffers.rows(down._key, num_rows) if residual is None else residual
        self.kernel.feed(down.kernel, *rows_of(x), num_rows, *rows_of(inner), *rows_of(out), residual is not None)
        return out


class NativeAdaptedLinear:
    """A `LinearKernel` that adds the products of LoRA adapters in one native call.

    A recording contains this call also if no row has an adapter. It then returns at once.

    Args:
        base: the layer without adapters.
        batch: always has the slots of the batch of `layer`.
    """

    def __init__(self, base: NativeLinear, layer: LoraLayer, batch: _native.LoraBatch) -> None:
        self._base = base
        self._layer = layer
        parts = [(part.a.data_ptr(), part.b.data_ptr(), part.ranks.ctypes.data, part.outputs) for part in layer.parts]
        self._kernel = native.LoraLinear(batch, base.kernel, layer.parts[0].a.shape[1], parts)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = self._base(x, residual, out)
        self._kernel(*rows_of(x), len(x), *rows_of(y))
        return y


class NativeMixture:
    """A mixture of experts in one native call, which groups the rows by expert.

    Attributes:
        num_bytes: the size of the norms, of which the experts share one, and of the vectors.
    """

    def __init__(self, mixture: Mixture, buffers: RowBuffers) -> None:
        shared, self.num_bytes = _native_norm(mixture.norm)
        own, own_bytes = (shared, 0) if mixture.router_norm is None else _native_norm(mixture.router_norm)
        scales, bias = _vector(mixture.expert_scales), _vector(mixture.selection_bias)
        self.num_bytes += own_bytes + _num_bytes(scales, bias)
        self._matrices: list[NativeMatrix] = []
        router = native.FusedLinear(*self._add(mixture.router), own)
        ups, downs = [], []
        for up, down in mixture.experts:
            ups.append(native.FusedLinear(*self._add(up), shared))
            downs.append(native.FusedLinear(*self._add(down), mixture.activation))
        routing = mixture.routing
        groups = () if routing.num_groups == 1 else (routing.num_groups, routing.groups_per_token)
        options = (routing.has_sigmoid, routing.sum_eps, routing.sum_min, routing.scale, bias, *groups)
        self._kernel = native.ExpertMixture(
            router, ups, downs, routing.experts_per_token, routing.softmax == "chosen", scales, *options
        )
        self._buffers = buffers

    def _add(self, loaded: LoadedMatrix) -> tuple[list[_native.PackedMatrix], FloatArray | None]:
        """Keep a matrix, and return its parts and its bias."""
        matrix: NativeMatrix = loaded.matrix
        bias = _vector(loaded.bias)
        self._matrices.append(matrix)
        self.num_bytes += _num_bytes(bias)
        return list(matrix.parts), bias

    def __call__(self, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        num_rows, size = x.shape
        out = self._buffers.rows(("sum of experts", size), num_rows)
        assert out.data_ptr() != x.data_ptr(), "x and the result must not share memory"
        self._kernel(*rows_of(x if routed is None else routed), *rows_of(x), num_rows, *rows_of(out))
        return out


class NativeResidualSum:
    """A `ResidualSumKernel` that computes in the memory of the stream.

    Attributes:
        num_bytes: the size of the norms, which the extension copies.
    """

    def __init__(self, after: Prologue, of_sum: Prologue, multiplier: float, scale: float = 1.0) -> None:
        (first, first_bytes), (second, second_bytes) = (_native_norm(norm) for norm in (after, of_sum))
        self.num_bytes = first_bytes + second_bytes
        self._kernel = native.ResidualSum(first, second, multiplier, scale)

    def __call__(self, stream: torch.Tensor, branch: torch.Tensor | None) -> torch.Tensor:
        assert branch is None or branch.shape == stream.shape, "both must have the same shape"
        self._kernel(*rows_of(stream), *((0, 0) if branch is None else rows_of(branch)), *stream.shape)
        return stream


def native_gate(x: torch.Tensor, logits: torch.Tensor, activation: GateActivation) -> torch.Tensor:
    """Compute `Kernels.gate` in the memory of x."""
    assert len(x) == len(logits), "x and logits must have the same number of rows"
    (num_rows, size), num_gates = x.shape, logits.shape[1]
    native.gate(*rows_of(x), *rows_of(logits), num_rows, size, num_gates, activation)
    return x


def _vector(values: torch.Tensor | None) -> FloatArray | None:
    return None if values is None else values.float().numpy()


def _num_bytes(*vectors: FloatArray | None) -> int:
    return sum(vector.nbytes for vector in vectors if vector is not None)


def _native_norm(norm: Prologue) -> tuple[_native.Norm, int]:
    """A norm, and the bytes that the extension copies."""
    weight, bias = _vector(norm.weight), _vector(norm.bias)
    return native.Norm(norm.kind, weight, bias, norm.eps), _num_bytes(weight, bias)
