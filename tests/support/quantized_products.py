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

LEAST: Final = 1e-29
"""The largest magnitude of a row, from which on its scale is not 0: 127 / LEAST * 2^24 is finite in float32."""

LARGEST_STEP: Final = 127 * 128 + 63
"""The largest multiple of the scale of a row that an outlier can be."""


def quantize_groups(x: torch.Tensor, outlier_after: float, group: int = 32, *, has_powers: bool = True) -> torch.Tensor:
    """Quantize the activations x [T, n] as products do with weights that have scales for groups of inputs.

    A row has a scale, and a group a 2^k-th of it, with the largest k that fits its values. Values that exceed
    `outlier_after` times the mean magnitude of their group do not count for both. Those that their scale does not reach
    are outliers and remain floats, as in LLM.int8() (Dettmers et al., 2022, section 3.2); the others are rounded to
    integers from -127 to 127 times the scale.

    Args:
        x: the activations. If `group` is 256, n is a multiple of it.
        outlier_after: the threshold of outliers.
        group: the number of inputs that share a scale.
        has_powers: whether scales are powers of two times that of the row; otherwise they are the smallest that fit.

    Returns:
        The quantized values as float64 [T, n], so that a product with them adds no rounding.
    """
    num_rows, size = x.shape
    groups = torch.nn.functional.pad(x.float(), (0, -size % group)).view(num_rows, -1, group)
    magnitudes = groups.abs()
    is_far = magnitudes > (magnitudes.sum(-1) * (outlier_after / group)).unsqueeze(-1)
    top = magnitudes.masked_fill(is_far, 0).amax(-1, keepdim=True)
    most = top.amax(1, keepdim=True)
    powers = _powers(most.clamp(min=LEAST), top, has_powers=has_powers)
    is_outlier = magnitudes > torch.maximum(most.clamp(min=LEAST) / powers, top)
    seen = torch.where(is_outlier, groups.double(), _round_to_steps(groups, most, powers))
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


def _powers(most: torch.Tensor, top: torch.Tensor, *, has_powers: bool) -> torch.Tensor:
    """The largest numbers up to 2^24, powers of two or not, for which most / number is at least `top`."""
    ratio = most / torch.maximum(top, most * 2.0**-24)
    return torch.ldexp(torch.ones_like(top), torch.frexp(ratio)[1] - 1) if has_powers else ratio


def _round_to_steps(x: torch.Tensor, top: torch.Tensor, power: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Round to whole multiples of top / power / 127, as float64; to zero where `top` is zero."""
    inverse = torch.tensor(127.0, device=x.device) / top  # 127 / top would be 127 times the rounded 1 / top
    steps = torch.round(x * (torch.where(top > LEAST, inverse, 0.0) * power))
    return steps.double() * (top / 127).double() / power


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    prologue: NativePrologueKind,
    has_row_scale: bool = False,
    group: int = 32,
    *,
    has_powers: bool = True,
) -> torch.Tensor:
    """`reference_kernels.linear` with a matrix of integers, after a prologue of the given kind.

    Args:
        x: [T, in], quantized by `quantize_rows` or `quantize_groups`.
        weight: [out, in], the values of the matrix as floats.
        bias: [out] or None.
        has_row_scale: whether weights have one scale per output, and activations one per row.
        group: the number of inputs that share a scale otherwise.
        has_powers: whether these scales are powers of two times that of the row.
    """
    quantized = (
        quantize_rows(x, OUTLIER_AFTER_IN_ROWS[prologue])
        if has_row_scale
        else quantize_groups(x, OUTLIER_AFTER[prologue], group, has_powers=has_powers)
    )
    y = quantized @ weight.double().t()
    return (y if bias is None else y + bias.double()).float()
