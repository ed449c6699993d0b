"""GGUF metadata -> ModelConfig. Keys are those of the GGUF specification (ggml, docs/gguf.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from chairlift.models.config import ModelConfig, RopeConfig
from chairlift.models.config_fields import REQUIRED, Fields, divide, unique

ARCHITECTURES = ("llama", "qwen2", "qwen3")
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
FILE_TYPE_DTYPES = {0: "float32", 1: "float16", 32: "bfloat16"}


def read_gguf(
    metadata: Mapping[str, Any], source: str, tensor_names: Collection[str], rope_freqs: Sequence[float] | None
) -> ModelConfig:
    """See ModelConfig.from_gguf."""
    general, tokens = Fields(metadata, source, "general."), Fields(metadata, source, "tokenizer.ggml.")
    name = general.choice("architecture", ARCHITECTURES)
    fields = Fields(metadata, source, f"{name}.")
    fields.refuse("expert_count", 0, "mixtures of experts are not supported")
    layers, heads = fields.integer("block_count", high=4096), _per_layer(fields, "attention.head_count")
    head_dim = _head_dim(fields, heads)
    bos = tokens.token_ids("bos_token_id")
    return ModelConfig(
        architecture="llama",
        name=name,
        vocab_size=_vocab_size(fields, tokens),
        hidden_size=fields.integer("embedding_length"),
        intermediate_size=_per_layer(fields, "feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_kv_heads(fields, heads),
        head_dim=head_dim,
        max_position_embeddings=fields.integer("context_length"),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", high=1.0),
        sliding_windows=_windows(fields, layers),
        rope=_rope(fields, head_dim, rope_freqs),
        tie_word_embeddings=bool(tensor_names) and "output.weight" not in tensor_names,
        attention_bias=name == "qwen2" or "blk.0.attn_q.bias" in tensor_names,
        attention_output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_up.bias" in tensor_names,
        qk_norm=name == "qwen3",
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=unique(*(tokens.token_ids(key) for key in END_KEYS)),
        dtype=FILE_TYPE_DTYPES.get(general.integer("file_type", 0, low=0), "float16"),
    )


def _per_layer(fields: Fields, key: str, default: Any = REQUIRED) -> int:
    """An integer that some files repeat for each layer; layers that differ are refused."""
    value = fields.get(key, default)
    if not isinstance(value, list):
        return fields.integer(key, default)
    if not value or any(item != value[0] for item in value):
        raise fields.fail(key, f"differs between layers ({value!r}), which is not supported")
    return fields.as_integer(key, value[0])


def _kv_heads(fields: Fields, heads: int) -> int:
    kv_heads = _per_layer(fields, "attention.head_count_kv", heads)
    divide(fields, "attention.head_count", heads, "attention.head_count_kv", kv_heads)
    return kv_heads


def _head_dim(fields: Fields, heads: int) -> int:
    hidden = fields.integer("embedding_length")
    if fields.get("attention.key_length") is None:
        head_dim = divide(fields, "embedding_length", hidden, "attention.head_count", heads)
    else:
        head_dim = fields.integer("attention.key_length", high=4096)
    fields.refuse("attention.value_length", head_dim, "K and V must have the same width")
    fields.refuse("rope.dimension_count", head_dim, "rotation must cover the whole head")
    return head_dim


def _vocab_size(fields: Fields, tokens: Fields) -> int:
    if fields.get("vocab_size") is not None:
        return fields.integer("vocab_size")
    strings = tokens.get("tokens")
    if not isinstance(strings, Sequence) or not strings:
        raise fields.fail("vocab_size", "is missing, and so are the tokens that would tell it")
    return len(strings)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    fields.refuse("attention.sliding_window_pattern", None, "only one window for all layers is")
    window = fields.integer("attention.sliding_window", 0, low=0)
    return (window or None,) * layers


def _rope(fields: Fields, head_dim: int, rope_freqs: Sequence[float] | None) -> RopeConfig:
    rope = RopeConfig(theta=fields.number("rope.freq_base", 10000.0))
    kind = fields.choice("rope.scaling.type", ("none", "linear"), "none")
    key = "rope.scaling.factor" if fields.get("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = fields.number(key, 1.0) if kind == "linear" or key == "rope.scale_linear" else 1.0
    if rope_freqs is None:
        return rope if factor == 1.0 else replace(rope, scaling="linear", factor=factor)
    return replace(rope, scaling="factors", freq_factors=_freq_factors(fields, head_dim, rope_freqs, factor))


def _freq_factors(fields: Fields, head_dim: int, rope_freqs: Sequence[float], factor: float) -> tuple[float, ...]:
    if len(rope_freqs) != head_dim // 2 or not all(0 < value < float("inf") for value in rope_freqs):
        raise fields.fail("rope.dimension_count", f"asks for {head_dim // 2} positive numbers in rope_freqs.weight")
    return tuple(float(value) * factor for value in rope_freqs)
