"""MambaSizes: the sizes of Mamba-2 layers (Dao and Gu, 2024), and their declaration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from chairlift.models.declaration import (
    RECURRENCE,
    BranchNorms,
    ConvolutionSpec,
    LayerSpec,
    Mamba2Spec,
    MatrixSpec,
    NormSpec,
    RecurrenceSpec,
)
from chairlift.models.reading.architecture import GGUFHeader
from chairlift.models.reading.config_fields import ConfigFields, exact_quotient

MAX_WIDTH: Final = 16
"""The largest width of a convolution."""

INFINITY: Final = {"__float__": "Infinity"}
"""How transformers 5 writes an infinite number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSizes:
    """The sizes and switches of the Mamba-2 layers of a decoder.

    Attributes:
        width: the width of the convolution.
        norm_eps: of the gated norm; None for a gate without a norm.
        norm_groups: the number of groups of values that are normed together.
        projection_scales: see Mamba2Spec.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    width: int
    conv_bias: bool
    input_bias: bool = False
    output_bias: bool = False
    norm_eps: float | None = None
    norm_groups: int = 1
    norm_before_gate: bool = False
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    projection_scales: tuple[float, ...] = ()

    def declare(self, prefix: str, hidden_size: int) -> RecurrenceSpec:
        """Return the declaration of one layer, whose parameters begin with `prefix`."""
        inner = self.num_heads * self.head_dim
        norm = None if self.norm_eps is None else NormSpec("rms_norm", f"{prefix}.norm", inner, self.norm_eps)
        rule = Mamba2Spec(
            self.num_heads,
            self.head_dim,
            self.num_groups,
            self.state_size,
            f"{prefix}.A_log",
            f"{prefix}.dt_bias",
            f"{prefix}.D",
            norm,
            0 if norm is None else inner // self.norm_groups,
            self.norm_before_gate,
            self.dt_limits,
            self.projection_scales,
        )
        rows, channels = ((f"{prefix}.in_proj", sum(rule.row_parts)),), sum(rule.row_parts[1:4])
        return RecurrenceSpec(
            input=MatrixSpec(RECURRENCE, "mamba_in", rows, hidden_size, self.input_bias),
            output=MatrixSpec(RECURRENCE, "mamba_out", ((f"{prefix}.out_proj", hidden_size),), inner, self.output_bias),
            convolution=ConvolutionSpec(f"{prefix}.conv1d", channels, self.width, self.conv_bias),
            mamba2=rule,
        )

    def replace_attention(self, layer: LayerSpec, prefix: str, hidden_size: int) -> LayerSpec:
        """Return a layer with Mamba-2 in place of attention, with the same norms."""
        spec, norms = self.declare(prefix, hidden_size), layer.attention_norms
        return replace(layer, attention=None, attention_norms=BranchNorms(), recurrence=spec, recurrence_norms=norms)


def read_mamba_sizes(fields: ConfigFields, hidden_size: int) -> MambaSizes:
    """Read the fields of Granite 4 and of Falcon-H1, whose names begin with `mamba_`, without those of the norm."""
    heads = fields.integer("mamba_n_heads")
    inner = fields.integer("mamba_d_ssm", fields.integer("mamba_expand", 2) * hidden_size)
    if inner % heads:
        raise fields.error("mamba_n_heads", f"({heads}) must divide the inner size of a Mamba layer ({inner})")
    if fields.get("mamba_d_head", "auto") != "auto":
        head_dim = fields.integer("mamba_d_head")
        if head_dim * heads != inner:
            raise fields.error("mamba_d_head", f"({head_dim}) times mamba_n_heads ({heads}) must be {inner}")
    fields.get("mamba_chunk_size")  # Marks the field as read; the scan has no chunks here.
    return MambaSizes(
        num_heads=heads,
        head_dim=inner // heads,
        num_groups=read_group_count(fields, "mamba_n_groups", "mamba_n_heads", heads),
        state_size=fields.integer("mamba_d_state"),
        width=fields.integer("mamba_d_conv", 4, low=2, high=MAX_WIDTH),
        conv_bias=fields.flag("mamba_conv_bias", True),
        input_bias=fields.flag("mamba_proj_bias", False),
        output_bias=fields.flag("mamba_proj_bias", False),
        dt_limits=read_dt_limits(fields),
    )


def read_gguf_mamba_sizes(header: GGUFHeader, eps: float) -> MambaSizes:
    """Read the sizes of Mamba-2 layers in a GGUF file, whose tensors show the biases and whether there is a norm.

    Args:
        eps: of the norm.
    """
    fields, endings = header.fields, {name.split(".", 2)[-1] for name in header.tensor_names}
    heads, inner = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    groups = read_group_count(fields, "ssm.group_count", "ssm.time_step_rank", heads)
    return MambaSizes(
        num_heads=heads,
        head_dim=exact_quotient(fields, "ssm.inner_size", inner, "ssm.time_step_rank", heads),
        num_groups=groups,
        state_size=fields.integer("ssm.state_size"),
        width=fields.integer("ssm.conv_kernel", low=2, high=MAX_WIDTH),
        conv_bias="ssm_conv1d.bias" in endings,
        input_bias="ssm_in.bias" in endings,
        output_bias="ssm_out.bias" in endings,
        norm_eps=eps if "ssm_norm.weight" in endings else None,
        norm_groups=groups,
    )


def mamba_gguf_names(prefix: str) -> dict[str, str]:
    """The names of the parameters of Mamba-2 in GGUF files; see Architecture.gguf_names.

    Args:
        prefix: the name of Mamba-2 in a layer.
    """
    names = {"in_proj": "in", "conv1d": "conv1d", "dt_bias": "dt.bias", "A_log": "a", "D": "d", "norm": "norm"}
    names["out_proj"] = "out"
    return {f"model.layers.{{}}.{prefix}.{name}": f"blk.{{}}.ssm_{other}" for name, other in names.items()}


def read_group_count(fields: ConfigFields, key: str, heads_key: str, heads: int) -> int:
    """Read the number of groups of heads that share B and C."""
    groups = fields.integer(key)
    if heads % groups:
        raise fields.error(key, f"({groups}) must divide {heads_key} ({heads})")
    return groups


def read_dt_limits(fields: ConfigFields) -> tuple[float, float]:
    """Read `time_step_limit`, the limits of the step of time: [low, high], where high may be infinite."""
    limits = fields.get("time_step_limit", [0.0, INFINITY])
    numbers = [float("inf") if each == INFINITY else each for each in limits] if isinstance(limits, list) else []
    if (
        not all(isinstance(each, int | float) for each in numbers)
        or len(numbers) != 2
        or not 0 <= numbers[0] < numbers[1]
    ):
        raise fields.error(
            "time_step_limit", f"must be a list of two numbers, the smaller one first, got {limits!r:.80}"
        )
    return float(numbers[0]), float(numbers[1])
