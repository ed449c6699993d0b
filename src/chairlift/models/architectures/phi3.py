"""Phi-3 and Phi-4 (Microsoft, 2024 and 2025): `LlamaSizes` with fused projections.

Some models rotate a part of each head only, and scale the rotary embedding for long contexts by LongRoPE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from chairlift.models.architectures.llama import LlamaConfigReader, uniform_windows
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.reading.gguf_header import GGUFHeader
from chairlift.models.reading.layer_fields import read_head_dim
from chairlift.models.reading.llama_sizes import LlamaSizes
from chairlift.models.reading.rope_fields import read_gguf_rope, rope_parameters, rotated_dims

ORIGINAL_CONTEXT: Final = 4096
"""The context before LongRoPE, in files that do not contain it."""

SCALINGS: Final = ("default", "longrope", "su", "yarn")
"""Early files of Phi-3 call LongRoPE "su" or "yarn"."""


class Phi3ConfigReader(LlamaConfigReader):
    """The reader of Phi-3 and Phi-4."""

    def read_sizes(self, fields: ConfigFields) -> LlamaSizes:
        for key in ("interpolate_factor", "full_attn_mod"):
            fields.allow_only(key, 1, "the reference implementation ignores this option")
        return super().read_sizes(fields)

    def _rope(self, fields: ConfigFields) -> RopeConfig:
        return read_longrope(fields)


def read_longrope(fields: ConfigFields) -> RopeConfig:
    """Read a rotary embedding that LongRoPE may scale."""
    head_dim = read_head_dim(fields)
    if isinstance(fields, GGUFHeader):
        return _read_gguf_rope(fields, head_dim)
    nested = rope_parameters(fields)
    theta = fields.number("rope_theta", 10_000.0)
    part = fields.number("partial_rotary_factor", 1.0, high=1.0)
    original = fields.integer("original_max_position_embeddings", ORIGINAL_CONTEXT, low=2)
    if nested is not None:
        theta = nested.number("rope_theta", theta)
        part = nested.number("partial_rotary_factor", part, high=1.0)
        original = nested.integer("original_max_position_embeddings", original, low=2)
    rope = RopeConfig(theta=theta, rotary_dim=rotated_dims(fields, head_dim, part))
    if nested is None:
        return rope
    key = "type" if nested.get("rope_type") is None else "rope_type"
    if nested.choice(key, SCALINGS, "default") == "default":
        return rope
    factor = fields.integer("max_position_embeddings") / original
    attention = attention_factor(nested.number("factor", factor), original)
    return _with_longrope(
        fields,
        rope,
        {key: nested.get(key) for key in ("short_factor", "long_factor")},
        head_dim=head_dim,
        original=original,
        attention=nested.number("attention_factor", attention),
    )


def attention_factor(factor: float, original_context: int) -> float:
    """Return the factor of cosines and sines for a context that is `factor` times as long (LongRoPE, section 4)."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_context))


def _with_longrope(
    fields: ConfigFields,
    rope: RopeConfig,
    factors: Mapping[str, Any],
    *,
    head_dim: int,
    original: int,
    attention: float,
) -> RopeConfig:
    """Add the factors of LongRoPE, by their names in the file, the factors of short contexts first."""
    expected = rope.num_dims(head_dim) // 2
    for name, values in factors.items():
        if not _are_factors(values, expected):
            raise fields.error(name, f"must hold {expected} positive numbers, one for each pair of rotated dimensions")
    short, long = (tuple(float(value) for value in values) for values in factors.values())
    return replace(
        rope,
        scaling="longrope",
        freq_factors=short,
        long_factors=long,
        original_max_position_embeddings=original,
        attention_factor=attention,
    )


def _are_factors(values: Any, expected: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == expected
        and all(isinstance(value, int | float) and 0 < value < math.inf for value in values)
    )


def _read_gguf_rope(header: GGUFHeader, head_dim: int) -> RopeConfig:
    rope = read_gguf_rope(header, has_longrope=True)
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    if not all(name in header.rope_factors for name in names):
        return rope
    return _with_longrope(
        header,
        rope,
        {name: header.rope_factors[name] for name in names},
        head_dim=head_dim,
        original=header.integer("original_max_position_embeddings", ORIGINAL_CONTEXT),
        attention=header.number("rope.scaling.attn_factor", 1.0),
    )


READER: Final = Phi3ConfigReader(
    "phi3", uniform_windows, qkv_bias=False, fused_projections=("qkv_proj", "gate_up_proj")
)

PHI3: Final = Architecture(
    name="phi3",
    hf_readers={"Phi3ForCausalLM": READER},
    gguf_readers={"phi3": READER},
)
