"""Readers of the rotary embedding in `config.json` and in GGUF metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chairlift.models.config_fields import ConfigFields
from chairlift.models.declaration import RopeConfig

WHOLE_HEAD = "the rotation must cover the whole head"


def read_rope(fields: ConfigFields) -> RopeConfig:
    """Read the rotary embedding of a `config.json`.

    transformers 5 writes `rope_parameters`; earlier versions write `rope_theta` and `rope_scaling`.
    """
    fields.allow_only("partial_rotary_factor", 1.0, WHOLE_HEAD)
    scaling = fields.mapping("rope_parameters") or fields.mapping("rope_scaling")
    if scaling is None:
        return RopeConfig(theta=fields.number("rope_theta", 10000.0))
    scaling.allow_only("partial_rotary_factor", 1.0, WHOLE_HEAD)
    kind = _kind(scaling)
    rope = RopeConfig(theta=_theta(fields, scaling))
    if kind == "default":
        scaling.allow_only("factor", 1.0, "rotary embeddings of type default have no factor")
        return rope
    rope = replace(rope, scaling=kind, factor=scaling.number("factor"))
    return rope if kind == "linear" else _llama3(rope, scaling)


def _kind(scaling: ConfigFields) -> str:
    """Read the type of the scaling, which some files contain under both its old and its new key."""
    key, other = ("type", "rope_type") if scaling.get("rope_type") is None else ("rope_type", "type")
    kind = scaling.choice(key, ("default", "linear", "llama3"), "default")
    if scaling.get(other, kind) != kind:
        raise scaling.error(other, f"is {scaling.get(other)!r}, but {key} is {kind!r}; remove the wrong one")
    return kind


def _theta(fields: ConfigFields, scaling: ConfigFields) -> float:
    theta = fields.number("rope_theta", 10000.0)
    if scaling.get("rope_theta") is None:
        return theta
    inner = scaling.number("rope_theta")
    if fields.get("rope_theta", inner) != inner:
        raise fields.error("rope_theta", f"is {theta:g}, but {inner:g} in the scaling parameters; remove the wrong one")
    return inner


def _llama3(rope: RopeConfig, scaling: ConfigFields) -> RopeConfig:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise scaling.error("low_freq_factor", f"({low:g}) must be below high_freq_factor ({high:g})")
    original = scaling.integer("original_max_position_embeddings")
    return replace(rope, low_freq_factor=low, high_freq_factor=high, original_max_position_embeddings=original)


def read_gguf_rope(fields: ConfigFields, head_dim: int, rope_freqs: Sequence[float] | None) -> RopeConfig:
    """Read the rotary embedding of a GGUF file.

    Args:
        rope_freqs: the tensor `rope_freqs.weight`, or None if the file has no such tensor.
    """
    rope = RopeConfig(theta=fields.number("rope.freq_base", 10000.0))
    kind = fields.choice("rope.scaling.type", ("none", "linear"), "none")
    fields.allow_only("rope.scaling.attn_factor", 1.0, "only YaRN has an attention factor, and YaRN is not supported")
    key = "rope.scaling.factor" if fields.get("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = fields.number(key, 1.0) if kind == "linear" or key == "rope.scale_linear" else 1.0
    if rope_freqs is None:
        return rope if factor == 1.0 else replace(rope, scaling="linear", factor=factor)
    return replace(rope, scaling="factors", freq_factors=_freq_factors(fields, head_dim, rope_freqs, factor))


def _freq_factors(fields: ConfigFields, head_dim: int, rope_freqs: Sequence[float], factor: float) -> tuple[float, ...]:
    if len(rope_freqs) != head_dim // 2 or not all(0 < value < float("inf") for value in rope_freqs):
        raise fields.error("rope.dimension_count", f"requires {head_dim // 2} positive numbers in rope_freqs.weight")
    return tuple(float(value) * factor for value in rope_freqs)
