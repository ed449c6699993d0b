"""Readers of the rotary embedding in `config.json` and in GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields
from chairlift.models.reading.gguf_header import GGUFHeader
from chairlift.models.reading.layer_fields import read_head_dim

WHOLE_HEAD = "the rotation must cover the whole head"

NOT_ROTATED: Final = 1e30
"""The divisor of the frequency of a pair of dimensions that no position rotates noticeably, as in GGUF files."""


def read_rope(fields: ConfigFields, default_theta: float = 10_000.0, default_share: float | None = None) -> RopeConfig:
    """Read the rotary embedding of a model.

    transformers 5 writes `rope_parameters`; earlier versions write `rope_theta` and `rope_scaling`.

    Args:
        default_theta: the base in files that do not contain it.
        default_share: the share of the dimensions of a head that are rotated, in files that do not contain it; None if
            all are, in every file.
    """
    is_partial = default_share is not None
    if isinstance(fields, GGUFHeader):
        return read_gguf_rope(fields, is_partial=is_partial)
    scaling, theta = rope_parameters(fields), fields.number("rope_theta", default_theta)
    rope = _read_own_rope(fields, scaling, theta, is_partial=is_partial)
    if not is_partial:
        fields.allow_only("partial_rotary_factor", 1.0, WHOLE_HEAD)
        return rope
    share = fields.number("partial_rotary_factor", default_share, high=1.0)
    if scaling is not None:
        share = scaling.number("partial_rotary_factor", share, high=1.0)
    return replace(rope, rotary_dim=rotated_dims(fields, read_head_dim(fields), share))


def rope_parameters(fields: ConfigFields) -> ConfigFields | None:
    """Return the object with the parameters of the rotary embedding in a `config.json`, or None."""
    return fields.mapping("rope_parameters") or fields.mapping("rope_scaling")


def with_query_scale(fields: ConfigFields, rope: RopeConfig) -> RopeConfig:
    """Return a rotary embedding with the factor of queries that grows with their position."""
    is_gguf, key = isinstance(fields, GGUFHeader), "llama_4_scaling_beta"
    scaling = fields if is_gguf else fields.mapping("rope_parameters")
    if scaling is None:
        raise fields.error("rope_parameters", "is missing; the file is incomplete")
    scaling.ignore("max_position_embeddings")  # transformers ignores it.
    if scaling.get(key, 0 if is_gguf else REQUIRED) == 0:
        return rope
    beta = scaling.number(key)
    original = scaling.integer("original_max_position_embeddings")
    return replace(rope, query_scaling_beta=beta, original_max_position_embeddings=original)


def rotated_dims(fields: ConfigFields, head_dim: int, share: float) -> int | None:
    """Return `RopeConfig.rotary_dim` for the share of the dimensions of a head that are rotated."""
    dims = int(head_dim * share)
    if dims % 2 or not dims:
        raise fields.error(
            "partial_rotary_factor", f"({share:g}) must rotate an even number of the {head_dim} dimensions"
        )
    return None if dims == head_dim else dims


def read_layer_ropes(fields: ConfigFields, local_theta: float | None, theta: float) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotary embeddings of layers with a sliding window and of the others, of which only the second is scaled.

    transformers 5 writes one object for each type of layer; earlier versions write `rope_theta` and `rope_scaling`.

    Args:
        local_theta, theta: the bases in files that do not contain them. The first is None for `rope_theta` of the file.
    """
    local_theta = fields.number("rope_theta", theta) if local_theta is None else local_theta
    if isinstance(fields, GGUFHeader):
        return RopeConfig(theta=fields.number("rope_local_base_freq", local_theta)), read_gguf_rope(fields)
    both = fields.mapping("rope_parameters")
    if both is None:
        base = fields.number("rope_theta", theta)
        return RopeConfig(theta=local_theta), _read_own_rope(fields, fields.mapping("rope_scaling"), base)
    local, whole = both.mapping("sliding_attention"), both.mapping("full_attention")
    return _read_own_rope(fields, local, local_theta), _read_own_rope(fields, whole, theta)


def read_type_ropes(
    fields: ConfigFields,
    windows: Sequence[int | None],
    head_dims: Sequence[int],
    defaults: Mapping[str, Mapping[str, Any]],
    *,
    is_partial: bool = False,
) -> list[RopeConfig]:
    """Read the rotary embedding of each layer. `rope_parameters` has an object for each type of layer.

    Args:
        defaults: the objects in files without `rope_parameters`.
        is_partial: whether a part of each head may be rotated.
    """
    types = fields.mapping("rope_parameters") or ConfigFields(defaults, fields.source)
    types.ignore("full_attention", "sliding_attention")  # No effect if no layer is of the type.
    ropes = []
    for window, head_dim in zip(windows, head_dims, strict=True):
        kind = "full_attention" if window is None else "sliding_attention"
        if (scaling := types.mapping(kind)) is None:
            raise fields.error("rope_parameters", f"has no {kind}")
        ropes.append(_read_type_rope(fields, scaling, head_dim, is_partial=is_partial))
    return ropes


def _read_type_rope(fields: ConfigFields, scaling: ConfigFields, head_dim: int, *, is_partial: bool) -> RopeConfig:
    """Read the rotary embedding of a type of layer, which may be "proportional": the whole head has frequencies, and
    only the first pairs of dimensions are rotated."""
    theta = scaling.number("rope_theta")
    if scaling.get("rope_type") != "proportional":
        rope = _read_scaling(fields, scaling, theta, is_partial=is_partial)
        share = scaling.number("partial_rotary_factor", 1.0, high=1.0)
        return replace(rope, rotary_dim=rotated_dims(scaling, head_dim, share))
    share, factor = scaling.number("partial_rotary_factor", 1.0, high=1.0), scaling.number("factor", 1.0)
    num_rotated = int(share * head_dim // 2)
    factors = (factor,) * num_rotated + (NOT_ROTATED,) * (head_dim // 2 - num_rotated)
    return RopeConfig(theta=theta, scaling="factors", freq_factors=factors)


def _read_own_rope(
    fields: ConfigFields, scaling: ConfigFields | None, default_theta: float, *, is_partial: bool = False
) -> RopeConfig:
    """Read an object whose base precedes the one outside of it, as in transformers."""
    if scaling is None:
        return RopeConfig(theta=default_theta)
    return _read_scaling(fields, scaling, scaling.number("rope_theta", default_theta), is_partial=is_partial)


def _read_scaling(fields: ConfigFields, scaling: ConfigFields, theta: float, *, is_partial: bool = False) -> RopeConfig:
    scaling.ignore("mrope_section", "mrope_interleaved")  # The axes of positions in images are equal for text.
    if not is_partial:
        scaling.allow_only("partial_rotary_factor", 1.0, WHOLE_HEAD)
    kind = _kind(scaling)
    rope = RopeConfig(theta=theta)
    if kind == "default":
        scaling.allow_only("factor", 1.0, "rotary embeddings of type default have no factor")
        return rope
    rope = replace(rope, scaling=kind, factor=scaling.number("factor"))
    if kind != "linear":
        rope = replace(rope, original_max_position_embeddings=_original_context(fields, scaling))
    return _SCALINGS[kind](rope, scaling)


def _original_context(fields: ConfigFields, scaling: ConfigFields) -> int:
    """Read the context before the scaling, which is the whole context in files that do not contain it."""
    key = "original_max_position_embeddings"
    if fields.get(key) is None and scaling.get(key) is not None:
        return scaling.integer(key)
    scaling.ignore(key)  # The value outside takes precedence.
    return fields.integer("max_position_embeddings") if fields.get(key) is None else fields.integer(key)


def _kind(scaling: ConfigFields) -> str:
    """Read the type of the scaling, which some files contain under both its old and its new key."""
    key, other = ("type", "rope_type") if scaling.get("rope_type") is None else ("rope_type", "type")
    kind = scaling.choice(key, ("default", "mrope", *_SCALINGS), "default")
    kind = "default" if kind == "mrope" else kind  # The type of several axes, which are equal for text.
    if scaling.get(other, kind) not in (kind, "mrope"):
        raise scaling.error(other, f"is {scaling.get(other)!r}, but {key} is {kind!r}; remove the wrong one")
    return kind


def _llama3(rope: RopeConfig, scaling: ConfigFields) -> RopeConfig:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise scaling.error("low_freq_factor", f"({low:g}) must be below high_freq_factor ({high:g})")
    return replace(rope, low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: RopeConfig, scaling: ConfigFields) -> RopeConfig:
    """Read the parameters of YaRN, whose attention factor follows from `factor` unless the file contains it."""
    of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if scaling.get("attention_factor") is not None:
        attention = scaling.number("attention_factor")
    elif all(of_all):
        part, whole = (scaling.number(key) for key in ("mscale", "mscale_all_dim"))
        attention = yarn_attention_factor(rope.factor, part) / yarn_attention_factor(rope.factor, whole)
    else:
        attention = yarn_attention_factor(rope.factor)
    return replace(
        rope,
        beta_fast=scaling.number("beta_fast", 32),
        beta_slow=scaling.number("beta_slow", 1),
        truncate=scaling.flag("truncate", True),
        attention_factor=attention,
    )


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """Return the factor of cosines and sines for a context that is `factor` times as long (YaRN, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


_SCALINGS: Final[dict[str, Callable[[RopeConfig, ConfigFields], RopeConfig]]] = {
    "linear": lambda rope, scaling: rope,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""`rope_type` -> the reader of its parameters."""


def read_gguf_rope(header: GGUFHeader, *, is_partial: bool = False, has_longrope: bool = False) -> RopeConfig:
    """Read the rotary embedding of a GGUF file.

    Args:
        is_partial: whether a part of each head may be rotated.
        has_longrope: the same, and the caller adds the factors of LongRoPE, which are tensors.
    """
    head_dim = read_head_dim(header)
    rotary_dim = header.integer("rope.dimension_count", head_dim, high=head_dim)
    if not is_partial and not has_longrope:
        header.allow_only("rope.dimension_count", head_dim, WHOLE_HEAD)
    rope = RopeConfig(header.number("rope_theta"), rotary_dim=None if rotary_dim == head_dim else rotary_dim)
    if has_longrope:
        header.choice("rope.scaling.type", ("none", "longrope"), "none")
        return rope
    kind = header.choice("rope.scaling.type", ("none", "linear", "yarn"), "none")
    if kind == "yarn":
        return _gguf_yarn(header, rope)
    header.allow_only("rope.scaling.attn_factor", 1.0, "only YaRN and LongRoPE have an attention factor")
    key = "rope.scaling.factor" if header.get("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = header.number(key, 1.0) if kind == "linear" or key == "rope.scale_linear" else 1.0
    factors = header.rope_factors.get("rope_freqs.weight")
    if factors is None:
        return rope if factor == 1.0 else replace(rope, scaling="linear", factor=factor)
    if len(factors) != head_dim // 2 or not all(0 < value < math.inf for value in factors):
        raise header.error("rope.dimension_count", f"requires {head_dim // 2} positive numbers in rope_freqs.weight")
    return replace(rope, scaling="factors", freq_factors=tuple(float(value) * factor for value in factors))


def _gguf_yarn(fields: ConfigFields, rope: RopeConfig) -> RopeConfig:
    factor = fields.number("rope.scaling.factor")
    attention = fields.number("rope.scaling.yarn_attn_factor", yarn_attention_factor(factor))
    if fields.get("rope.scaling.yarn_log_multiplier", 0.0) != 0:
        attention /= yarn_attention_factor(factor, fields.number("rope.scaling.yarn_log_multiplier"))
    return replace(
        rope,
        scaling="yarn",
        factor=factor,
        original_max_position_embeddings=fields.integer(
            "rope.scaling.original_context_length", fields.get("context_length", REQUIRED)
        ),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0) * attention,
    )
