"""Row kernels of torch, for every device."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from chairlift.kernels.activations import GateActivation, find_activation, sigmoid, softplus
from chairlift.kernels.attention import QKNorm, RotaryStep
from chairlift.kernels.interface import NORM_KINDS, Prologue, RowKernel

PACK_ROWS = 16
"""The number of rows that oneDNN optimizes the layout of packed weights for.

16 is fast for 1 to 256 rows; 1 takes up to twice the time."""


class PackedLinear:
    """A linear layer on the CPU whose weight is a copy in the blocked layout of oneDNN; the original can be freed.

    Args:
        weight: [out, in], float32 or bfloat16.
        bias: [out] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        self._bias = bias
        self._apply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._apply(x, self._weight, self._bias, "none", [], "")
        return y

    @staticmethod
    def supports(weight: torch.Tensor) -> bool:
        """Whether oneDNN has a packed layout for the device and type of the weight."""
        if weight.device.type != "cpu" or not torch._C._has_mkldnn:
            return False
        if weight.dtype == torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return weight.dtype == torch.float32


def gate(x: torch.Tensor, logits: torch.Tensor, activation: GateActivation) -> torch.Tensor:
    """Compute `Kernels.gate` in the memory of x."""
    factors = sigmoid(logits) if activation == "sigmoid" else softplus(logits)
    (num_rows, size), num_gates = x.shape, logits.shape[1]
    x.view(num_rows, num_gates, size // num_gates).mul_(factors[..., None])
    return x


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def activate_and_multiply(
    gate_up: torch.Tensor, of_gate: RowKernel, of_up: RowKernel | None, factor: float = 1.0
) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return of_gate(gate if factor == 1 else gate * factor).mul_(up if of_up is None else of_up(up))


def make_prologue(prologue: Prologue) -> RowKernel:
    """The function of rows that computes a prologue."""
    if prologue.kind == "none":
        return lambda x: x
    if prologue.kind not in NORM_KINDS:
        activation, is_gated = find_activation(prologue.kind)
        function, parameters = activation.function, prologue.parameters
        if not is_gated:
            return lambda x: function(x, *parameters)
        return lambda x: activate_and_multiply(x, function, activation.of_up, *parameters)
    weight, bias, eps = prologue.weight, prologue.bias, prologue.eps
    assert weight is not None, "norms have a weight"
    if prologue.kind == "rms_norm":
        return partial(rms_norm, weight=weight, eps=eps)
    assert bias is not None, "LayerNorm has a bias"
    return partial(F.layer_norm, normalized_shape=weight.shape, weight=weight, bias=bias, eps=eps)


def norm_and_rotate(
    heads: torch.Tensor, weight: torch.Tensor | None, norm: QKNorm | None, rotary: RotaryStep | None
) -> torch.Tensor:
    """Compute the norm with `weight` and the rotation of the heads of query or key, in the order of `norm`."""
    if weight is not None and norm is not None and not norm.follows_rotation:
        heads = rms_norm(heads, weight, norm.eps)
    if rotary is not None:
        heads = rotate(heads, *rotary.rows)
    if weight is not None and norm is not None and norm.follows_rotation:
        heads = rms_norm(heads, weight, norm.eps)
    return heads


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, head_dim] by `RotaryStep.rows`, as x * cos + (x with swapped halves) * signed_sin."""
    num_dims = cos.shape[-1]
    x32 = x[..., :num_dims].float()
    swapped = x32.roll(num_dims // 2, dims=-1)
    rotated = torch.addcmul(x32 * cos, swapped, signed_sin).to(x.dtype)
    return rotated if num_dims == x.shape[-1] else torch.cat((rotated, x[..., num_dims:]), dim=-1)
