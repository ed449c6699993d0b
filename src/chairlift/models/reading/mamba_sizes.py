"""MambaSizes: the sizes of Mamba-2 layers (Dao and Gu, 2024), and their declaration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chairlift.kernels.recurrence_sizes import Mamba2Sizes, sizes_of
from chairlift.models.declaration.matrix_spec import RECURRENCE, MatrixSpec, NormSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.declaration.recurrence_spec import ConvolutionSpec, Mamba2Spec, RecurrenceSpec
from chairlift.models.reading.config_fields import ConfigFields, exact_quotient
from chairlift.models.reading.gguf_header import GGUFHeader, names_in_layers
from chairlift.models.reading.layer_fields import read_width

INFINITY: Final = {"__float__": "Infinity"}
"""How transformers 5 writes an infinite number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSizes(Mamba2Sizes):
    """The sizes and switches of the Mamba-2 layers of a decoder.

    Attributes:
        width: the width of the convolution.
        norm_eps: of the gated norm; None for a gate without a norm.
        projection_scales: see Mamba2Spec.
    """

    width: int
    conv_bias: bool
    input_bias: bool = False
    output_bias: bool = False
    norm_eps: float | None = None
    projection_scales: tuple[float, ...] = ()

    def declare(self, prefix: str, hidden_size: int) -> RecurrenceSpec:
        """Return the declaration of one layer, whose parameters begin with `prefix`."""
        inner, rows = self.out_features, ((f"{prefix}.in_proj", sum(self.row_parts)),)
        norm = None if self.norm_eps is None else NormSpec("rms_norm", f"{prefix}.norm", inner, self.norm_eps)
        return RecurrenceSpec(
            input=MatrixSpec(RECURRENCE, "mamba_in", rows, hidden_size, self.input_bias),
            output=MatrixSpec(RECURRENCE, "mamba_out", ((f"{prefix}.out_proj", hidden_size),), inner, self.output_bias),
            convolution=ConvolutionSpec(f"{prefix}.conv1d", self.row_parts[1], self.width, self.conv_bias),
            mamba2=Mamba2Spec(
                name=prefix, norm=norm, projection_scales=self.projection_scales, **sizes_of(Mamba2Sizes, self)
            ),
        )

    def replace_attention(self, config: ModelConfig, recurrent: Sequence[bool]) -> ModelConfig:
        """Return a model with Mamba-2 in place of attention in some layers, under the names of Granite 4 H."""
        size = config.hidden_size
        return config.with_recurrences(recurrent, lambda index: self.declare(f"model.layers.{index}.mamba", size))


def read_mamba_sizes(fields: ConfigFields, hidden_size: int) -> MambaSizes:
    """Read the fields of Granite 4 and of Falcon-H1 whose names begin with `mamba_`, except the fields of the norm."""
    heads = fields.integer("mamba_n_heads")
    inner = fields.integer("mamba_d_ssm", fields.integer("mamba_expand", 2) * hidden_size)
    if inner % heads:
        raise fields.error("mamba_n_heads", f"({heads}) must divide the inner size of a Mamba layer ({inner})")
    if fields.get("mamba_d_head", "auto") != "auto":
        head_dim = fields.integer("mamba_d_head")
        if head_dim * heads != inner:
            raise fields.error("mamba_d_head", f"({head_dim}) times mamba_n_heads ({heads}) must be {inner}")
    fields.ignore("mamba_chunk_size")  # The scan has no chunks here.
    return MambaSizes(
        num_heads=heads,
        head_dim=inner // heads,
        num_groups=read_group_count(fields, "mamba_n_groups", "mamba_n_heads", heads),
        state_size=fields.integer("mamba_d_state"),
        width=read_width(fields, "mamba_d_conv", 4),
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
    endings = {name.split(".", 2)[-1] for name in header.tensor_names}
    heads, inner = header.integer("ssm.time_step_rank"), header.integer("ssm.inner_size")
    groups = read_group_count(header, "ssm.group_count", "ssm.time_step_rank", heads)
    return MambaSizes(
        num_heads=heads,
        head_dim=exact_quotient(header, "ssm.inner_size", inner, "ssm.time_step_rank", heads),
        num_groups=groups,
        state_size=header.integer("ssm.state_size"),
        width=read_width(header, "ssm.conv_kernel"),
        conv_bias="ssm_conv1d.bias" in endings,
        input_bias="ssm_in.bias" in endings,
        output_bias="ssm_out.bias" in endings,
        norm_eps=eps if "ssm_norm.weight" in endings else None,
    )


def mamba_gguf_names(prefix: str) -> dict[str, str]:
    """The names of the parameters of Mamba-2 in GGUF files; see Architecture.gguf_names.

    Args:
        prefix: the name of Mamba-2 in a layer.
    """
    names = {"in_proj": "in", "conv1d": "conv1d", "dt_bias": "dt.bias", "A_log": "a", "D": "d", "norm": "norm"}
    names["out_proj"] = "out"
    return names_in_layers(prefix, {name: f"ssm_{other}" for name, other in names.items()})


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
