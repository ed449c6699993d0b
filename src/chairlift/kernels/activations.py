"""The activation functions of feed-forward networks: one table for all kernel sets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

if TYPE_CHECKING:
    import torch

GATED_SUFFIX: Final = "_and_mul"

SWIGLUOAI_ALPHA: Final = 1.702
SWIGLUOAI_LIMIT: Final = 7.0
"""The constants of "swigluoai", the activation of gpt-oss."""

NativePrologueKind = Literal[
    "none", "rms_norm", "layer_norm", "silu_and_mul", "gelu_tanh_and_mul", "swigluoai_and_mul", "relu", "relu2"
]
NATIVE_PROLOGUES: Final[tuple[str, ...]] = get_args(NativePrologueKind)
"""The norms and row kernels that native kernels compute before a product. Torch computes the others there too."""


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation function.

    Attributes:
        definition: elementwise; returns a new tensor of the type of its argument.
        fast: the same function as one call of torch; None if torch has none.
        of_up: the function of the values that a gated network multiplies; None for the values themselves.
    """

    definition: Callable[[torch.Tensor], torch.Tensor]
    fast: Callable[[torch.Tensor], torch.Tensor] | None = None
    of_up: Callable[[torch.Tensor], torch.Tensor] | None = None


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The sigmoid by torch.exp, whose last bit does not depend on the position of a value in the tensor, unlike that of
    torch.sigmoid."""
    return 1 / (1 + (-x).exp())


def _silu(x: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional

    return functional.silu(x)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional

    return functional.gelu(x, approximate="tanh")


def _gelu(x: torch.Tensor) -> torch.Tensor:
    from torch.nn import functional

    return functional.gelu(x)


def _define_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU (Hendrycks and Gimpel, 2016) with the error function, in float32."""
    x32 = x.float()
    return (0.5 * x32 * (1 + (x32 / math.sqrt(2)).erf())).to(x.dtype)


def _define_gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """The tanh approximation of GELU (Hendrycks and Gimpel, 2016), in float32."""
    x32 = x.float()
    return (0.5 * x32 * (1 + (math.sqrt(2 / math.pi) * (x32 + 0.044715 * x32**3)).tanh())).to(x.dtype)


def _define_swigluoai(x: torch.Tensor) -> torch.Tensor:
    """The gate of gpt-oss: SiLU with a steeper sigmoid, of values up to SWIGLUOAI_LIMIT."""
    gate = x.clamp(max=SWIGLUOAI_LIMIT)
    return gate * (SWIGLUOAI_ALPHA * gate).sigmoid()


ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": Activation(lambda x: x * x.sigmoid(), _silu),
    "gelu_tanh": Activation(_define_gelu_tanh, _gelu_tanh),
    "gelu": Activation(_define_gelu, _gelu),
    "relu": Activation(lambda x: x.clamp(min=0), lambda x: x.relu()),
    "relu2": Activation(lambda x: x.clamp(min=0) ** 2, lambda x: x.relu().square_()),
    "swigluoai": Activation(_define_swigluoai, of_up=lambda x: x.clamp(-SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT) + 1),
}
"""Name in a declaration -> the function. An architecture with a function of its own adds it here."""


def activation_kernel(name: str, gated: bool) -> str:
    """The name of a row kernel: "relu", or "silu_and_mul" for rows that hold the gate and then as many values."""
    return f"{name}{GATED_SUFFIX}" if gated else name


def find_activation(kernel: str) -> tuple[Activation, bool]:
    """The function of a row kernel, and whether it is gated; raises KeyError where there is none."""
    if kernel in ACTIVATIONS:
        return ACTIVATIONS[kernel], False
    name = kernel.removesuffix(GATED_SUFFIX)
    if name == kernel:
        raise KeyError(kernel)
    return ACTIVATIONS[name], True
