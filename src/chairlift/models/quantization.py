"""The quantization of a checkpoint as data: how the matrices of its linear layers are stored."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from chairlift.kernels.weight_formats import ORDERED

LINEAR: Final = "Linear"
"""The target that stands for all linear layers."""

REGEX: Final = "re:"
"""The prefix of targets that are regular expressions."""

SHARED_SCALE: Final = 128
"""The inputs with one scale in u4_g128 and f8_e4m3."""

MARKERS: Final = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")
"""The ends of names of tensors that show that a linear layer is quantized."""

NVFP4_GROUP: Final = 16
"""The inputs with one scale in NVFP4."""

ACTIVATION_SCALES: Final = re.compile(
    r"\.(input|activation|act|output|[qkv]|kv|prob)(_global)?_(scale|zero_point)(_ub|_inv)?$"
)
"""The ends of names of tensors that quantize activations, K or V, which the weights do not need."""

MXFP4_ENDS: Final = ("_blocks", "_scales")
"""The ends of names of the two tensors that hold matrices in MXFP4."""


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How a matrix is stored. A weight is scale * (number - zero point), with one scale for a group of inputs.

    Attributes:
        method: the `quant_method` of the checkpoint: "awq", "compressed-tensors", "fp8", "gptq" or "mxfp4".
        bits: 4 or 8.
        is_float: whether numbers are floats (E4M3, or E2M1 with 4 bits) instead of integers.
        group_size: the inputs with one scale; None for one scale for each output, or for all of them.
        block_rows: the outputs with one scale.
        symmetric: whether all zero points are in the middle of the range of numbers, or zero for floats.
        act_order: whether a tensor assigns the inputs to groups. Otherwise groups consist of consecutive inputs.
        zero_point_offset: the difference between a zero point and the number in the file.
        divides: whether the file has the reciprocals of the scales, for floats of 8 bits.
    """

    method: str
    bits: int
    is_float: bool = False
    group_size: int | None = None
    block_rows: int = 1
    symmetric: bool = True
    act_order: bool = False
    zero_point_offset: int = 0
    divides: bool = False

    @property
    def center(self) -> int:
        """The zero point of symmetric integers, as unsigned numbers."""
        return 1 << (self.bits - 1)

    def packed_format(self, in_features: int) -> str:
        """The format of the kernels for a matrix with this number of inputs, see `kernels.weight_formats`."""
        name = self._packed_format(self.group_size or in_features)
        return name + ORDERED if self.act_order else name

    def _packed_format(self, group_size: int) -> str:
        if self.is_float:
            return "f8_e4m3" if self.bits == 8 else "nvfp4" if group_size == NVFP4_GROUP else "mxfp4"
        if self.bits == 8 and self.symmetric:
            return "int8" if self.group_size is None else "q8_0"
        if self.bits == 8:
            return "u8_g32"
        if self.symmetric and group_size <= SHARED_SCALE:
            return "q4_0"
        return "u4_g128" if group_size % SHARED_SCALE == 0 else "u4_g32"


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantized linear layers of a checkpoint.

    Attributes:
        schemes: pairs of targets and their scheme. A target is LINEAR, the name of a module, or REGEX and a regular
            expression that matches the beginning of names. Names have precedence.
        ignored: the targets that are not quantized, where the checkpoint names them in this form.
    """

    method: str
    schemes: tuple[tuple[tuple[str, ...], WeightScheme], ...]
    ignored: tuple[str, ...] = ()

    def scheme(self, module: str, *others: str) -> WeightScheme | None:
        """Return the scheme of a linear layer, or None if it is not quantized.

        Args:
            module: its name in the file.
            others: the other names of its weight, because names in the configuration may be those of another version of
                transformers.
        """
        names = [module, *(name.removesuffix(".weight") for name in others)]
        if any(_matches(name, self.ignored) for name in names):
            return None
        for accepts_all in (False, True):
            for targets, scheme in self.schemes:
                if (accepts_all and LINEAR in targets) or any(_matches(name, targets) for name in names):
                    return scheme
        return None


def _matches(module: str, targets: Sequence[str]) -> bool:
    return any(
        re.match(target.removeprefix(REGEX), module) is not None if target.startswith(REGEX) else target == module
        for target in targets
    )


def quantized_module(names: Sequence[str], file_names: Collection[str]) -> str | None:
    """Return the name in the file of the quantized layer of a parameter, or None if the parameter is not quantized.

    Args:
        names: the names that the file may use for the parameter, see `Architecture.hf_names`.
        file_names: the names of all tensors in the file.
    """
    for name in names:
        if f"{name}{MXFP4_ENDS[0]}" in file_names:
            return name
        module = name.removesuffix(".weight")
        if module != name and any(f"{module}.{marker}" in file_names for marker in MARKERS):
            return module
    return None
