"""The sizes of recurrences, which declarations and kernels have in common, without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GatedDeltaSizes:
    """The sizes of the gated delta rule, see `kernels.recurrence.GatedDelta`.

    Attributes:
        beta_scale: 2 where the state may have negative eigenvalues.
        has_tiled_keys: the order of heads in GGUF files.
        has_channel_decay: whether each channel of a key has its own decay (Kimi Team, 2025), instead of each head.
        gate: the function of z.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    beta_scale: float = 1.0
    has_tiled_keys: bool = False
    has_channel_decay: bool = False
    gate: Literal["silu", "sigmoid"] = "silu"

    @property
    def num_keys(self) -> int:
        """The number of values in the keys of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def out_features(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """The number of channels of the convolution."""
        return 2 * self.num_keys + self.out_features

    @property
    def num_decays(self) -> int:
        """The number of decays of a token."""
        return self.num_heads * (self.key_dim if self.has_channel_decay else 1)

    @property
    def row_parts(self) -> dict[str, int]:
        """The widths of the inputs of the convolution, of z, of b and of a, in the order of a row."""
        widths = {"qkv": self.num_channels, "z": self.out_features, "b": self.num_heads, "a": self.num_decays}
        order = ("a", "z", "qkv", "b") if self.has_channel_decay else tuple(widths)
        return {name: widths[name] for name in order}

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.key_dim, self.value_dim


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Mamba2Sizes:
    """The sizes of Mamba-2, see `kernels.recurrence.Mamba2`.

    Attributes:
        state_size: the width of B and C in a group.
        norm_before_gate: whether the norm, if there is one, precedes the gate.
        dt_limits: the limits of t.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    norm_before_gate: bool = False
    dt_limits: tuple[float, float] = (0.0, float("inf"))

    @property
    def out_features(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def norm_group_size(self) -> int:
        """The number of values that are normed together."""
        return self.out_features // self.num_groups

    @property
    def mixed_parts(self) -> tuple[int, int, int]:
        """The widths of x, B and C."""
        shared = self.num_groups * self.state_size
        return self.out_features, shared, shared

    @property
    def row_parts(self) -> tuple[int, int, int]:
        """The widths of z, of the inputs of the convolution, and of dt in a row."""
        return self.out_features, sum(self.mixed_parts), self.num_heads

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.state_size, self.head_dim


def sizes_of(kind: type[GatedDeltaSizes | Mamba2Sizes], rule: GatedDeltaSizes | Mamba2Sizes) -> dict[str, Any]:
    """Return the fields of `kind` of an instance of one of its subclasses, as arguments of another one."""
    return {field.name: getattr(rule, field.name) for field in fields(kind)}
