"""The type of the compiled extension module, as its callers see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from chairlift.kernels.cpu import _native

    Int64Array = npt.NDArray[np.int64]
    Float32Array = npt.NDArray[np.float32]
    Uint32Array = npt.NDArray[np.uint32]


class NativeExtension(Protocol):
    """The functions and classes of `_native`, which `_native.pyi` documents with shapes and dtypes.

    The type system has no name for a module, so `load()` returns this protocol. mypy checks that the stub implements
    it, and a test checks that the stub describes the compiled module.
    """

    AttentionStep: type[_native.AttentionStep]
    ExpertMixture: type[_native.ExpertMixture]
    FusedLinear: type[_native.FusedLinear]
    LoraBatch: type[_native.LoraBatch]
    LoraLinear: type[_native.LoraLinear]
    MatrixRecurrence: type[_native.MatrixRecurrence]
    Norm: type[_native.Norm]
    PackedMatrix: type[_native.PackedMatrix]
    PagedAttention: type[_native.PagedAttention]
    ReadBuffer: type[_native.ReadBuffer]
    ResidualSum: type[_native.ResidualSum]
    ShortConvolution: type[_native.ShortConvolution]
    StateStep: type[_native.StateStep]
    Tape: type[_native.Tape]
    TokenSampler: type[_native.TokenSampler]

    def isa(self) -> str: ...
    def available_isas(self) -> list[str]: ...
    def set_isa(self, name: str) -> None: ...
    def num_threads(self) -> int: ...
    def set_num_threads(self, num_threads: int) -> None: ...
    def set_tile_order(self, seed: int) -> None: ...

    def gate(
        self,
        x_ptr: int,
        x_stride: int,
        logits_ptr: int,
        logits_stride: int,
        num_rows: int,
        size: int,
        is_shared: bool,
    ) -> None: ...
    def mask_rows(self, logits_ptr: int, vocab_size: int, rows: Int64Array, masks: Uint32Array) -> None: ...
    def logprobs(
        self,
        logits_ptr: int,
        vocab_size: int,
        tokens: Int64Array,
        ids: Int64Array,
        logprobs: Float32Array,
        ranks: Int64Array,
    ) -> None: ...

    def measure_barrier(self, seconds: float) -> float: ...
    def measure_products(self, unit: str, seconds: float) -> float: ...


if TYPE_CHECKING:
    _CHECKED: NativeExtension = _native
