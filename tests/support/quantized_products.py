"""The definition of native products with matrices of integers, whose activations are integers too."""

from __future__ import annotations

from typing import Final, get_args

import torch

from chairlift.kernels.activations import NativePrologueKind

KINDS: Final[tuple[NativePrologueKind, ...]] = get_args(NativePrologueKind)

OUTLIER_AFTER: Final[dict[NativePrologueKind, float]] = {
    **dict.fromkeys(KINDS, 12.0),
    "none": 8,
    "rms_norm": 5,
    "layer_norm": 5,
}
"""The threshold of outliers among the inputs of a quantized product, in multiples of the mean magnitude of their group,
by the prologue that computed them."""

OUTLIER_AFTER_IN_ROWS: Final[dict[NativePrologueKind, float]] = {
    **dict.fromkeys(KINDS, 8.0),
    "none": 5,
    "rms_norm": 3.5,
    "layer_norm": 3.5,
}
"""The same in multiples of the mean magnitude of the row, where a row has one scale."""

LARGEST_STEP: Final = 127 * 128 + 63
"""The largest multiple of the scale of a row that an outlier can be."""


def quantize_groups(x: torch.Tensor, outlier_after: float, group: int = 32) -> torch.Tensor:
    """Quantize the activations x [T, n] as products do with weights that have scales for groups of inputs.

    A value whose magnitude exceeds `outlier_after` times the mean magnitude of its group of values is an outlier and
    remains a float, as in LLM.int8() (Dettmers et al., 2022, section 3.2). The other values are rounded to integers
    from -127 to 127 times a scale; the largest one becomes 127.

    Args:
        x: the activations. If `group` is 256, n is a multiple of it.
        outlier_after: the threshold of outliers.
        group: the number of inputs that share a scale.

    Returns:
        The quantized values as float64 [T, n], so that a product with them adds no rounding.
    """
    num_rows, size = x.shape
    groups = torch.nn.functional.pad(x.float(), (0, -size % group)).view(num_rows, -1, group)
    magnitudes = groups.abs()
    is_outlier = magnitudes > (magnitudes.sum(-1) * (outlier_after / group)).unsqueeze(-1)
    top = magnitudes.masked_fill(is_outlier, 0).amax(-1, keepdim=True)
    seen = torch.where(is_outlier, groups.double(), _round_to_steps(groups, top))
    return seen.view(num_rows, -1)[:, :size]


def quantize_rows(x: torch.Tensor, outlier_after: float) -> torch.Tensor:
    """Quantize the activations x [T, n] as products do with weights that have one scale per output.

    All values of a row are rounded to integers times one scale, so that a product is one sum of integers. The scale is
    1/127 of the largest magnitude without outliers, which are values of more than `outlier_after` times the mean
    magnitude of the row; they become integers of up to `LARGEST_STEP`.

    Returns:
        The quantized values as float64 [T, n].
    """
    magnitudes = x.float().abs()
    padded = x.shape[1] + -x.shape[1] % 32
    limit = magnitudes.sum(-1, keepdim=True) * (outlier_after / padded)
    inlier = magnitudes.masked_fill(magnitudes > limit, 0).amax(-1, keepdim=True)
    return _round_to_steps(x.float(), torch.maximum(inlier, magnitudes.amax(-1, keepdim=True) * (127 / LARGEST_STEP)))


def _round_to_steps(x: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Round to whole multiples of top / 127, as float64; to zero where `top` is zero."""
    inverse = torch.tensor(127.0, device=x.device) / top  # 127 / top would be 127 times the rounded 1 / top
    return torch.round(x * torch.where(top > 1e-30, inverse, 0.0)).double() * (top / 127).double()


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    prologue: NativePrologueKind,
    has_row_scale: bool = False,
    group: int = 32,
) -> torch.Tensor:
    """`reference_kernels.linear` with a matrix of integers, after a prologue of the given kind.

    Args:
        x: [T, in], quantized by `quantize_rows` or `quantize_groups`.
        weight: [out, in], the values of the matrix as floats.
        bias: [out] or None.
        has_row_scale: whether weights have one scale per output, and activations one per row.
        group: the number of inputs that share a scale otherwise.
    """
    quantized = (
        quantize_rows(x, OUTLIER_AFTER_IN_ROWS[prologue])
        if has_row_scale
        else quantize_groups(x, OUTLIER_AFTER[prologue], group)
    )
    y = quantized @ weight.double().t()
    return (y if bias is None else y + bias.double()).float()
