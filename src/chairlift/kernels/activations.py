"""The activation functions of feed-forward networks: one table for all kernel sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import exp, log1p
from typing import TYPE_CHECKING, Final, Literal, get_args

if TYPE_CHECKING:
    import torch

GATED_SUFFIX: Final = "_and_mul"

SWIGLUOAI_ALPHA: Final = 1.702
SWIGLUOAI_LIMIT: Final = 7.0
"""The constants of "swigluoai", the activation of gpt-oss."""

NativePrologueKind = Literal[
    "none",
    "rms_norm",
    "layer_norm",
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "relu2",
    "xielu",
    "silu_and_mul",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "relu_and_mul",
    "relu2_and_mul",
    "swigluoai_and_mul",
]
NATIVE_PROLOGUES: Final[tuple[str, ...]] = get_args(NativePrologueKind)
"""The norms and row kernels that native kernels compute before a product. Torch computes the others there too."""


GateActivation = Literal["sigmoid", "softplus"]
"""The function of the logits of `Kernels.gate`."""

LINEAR_SOFTPLUS: Final = 20.0
"""softplus(x) is x where x is greater."""


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation function.

    Attributes:
        function: elementwise; returns a new tensor of the type of its first argument. The others are the parameters of
            the activation (`Prologue.parameters`), unless it is gated.
        of_up: the function of the values that a gated network multiplies; None for the values themselves.
    """

    function: Callable[..., torch.Tensor]
    of_up: Callable[[torch.Tensor], torch.Tensor] | None = None


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The sigmoid by torch.exp. Unlike with torch.sigmoid, its last bit does not depend on the position of a value in
    the tensor."""
    return 1 / (1 + (-x).exp())


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + e^x), whose last bit does not depend on the position of a value in the tensor either."""
    return x.where(x > LINEAR_SOFTPLUS, x.clamp(max=LINEAR_SOFTPLUS).exp().log1p())


def _functional(x: torch.Tensor, name: str, **options: str) -> torch.Tensor:
    """Compute a function of torch.nn.functional, which is imported at the first call."""
    from torch.nn import functional

    result: torch.Tensor = getattr(functional, name)(x, **options)
    return result


def _swigluoai(x: torch.Tensor) -> torch.Tensor:
    """The gate of gpt-oss: SiLU with a steeper sigmoid, of values up to SWIGLUOAI_LIMIT."""
    gate = x.clamp(max=SWIGLUOAI_LIMIT)
    return gate * (SWIGLUOAI_ALPHA * gate).sigmoid()


def _xielu(x: torch.Tensor, alpha_p: float, alpha_n: float, beta: float, eps: float) -> torch.Tensor:
    """xIELU (Huang and Schlag, 2024, arXiv:2411.13010), as `XIELUActivation` of transformers computes it."""
    positive, negative = (log1p(exp(alpha)) for alpha in (alpha_p, alpha_n))
    below = (x.clamp(max=eps).expm1() - x) * (beta + negative)
    return below.where(x <= 0, positive * x * x) + beta * x


ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": Activation(partial(_functional, name="silu")),
    "gelu_tanh": Activation(partial(_functional, name="gelu", approximate="tanh")),
    "gelu": Activation(partial(_functional, name="gelu")),
    "relu": Activation(lambda x: x.relu()),
    "relu2": Activation(lambda x: x.relu().square_()),
    "xielu": Activation(_xielu),
    "swigluoai": Activation(_swigluoai, of_up=lambda x: x.clamp(-SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT) + 1),
}
"""Name in a declaration -> the function. An architecture with another function adds it here."""


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
