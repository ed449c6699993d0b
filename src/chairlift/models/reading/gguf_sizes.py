"""Readers of the GGUF metadata that Llama-style architectures have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from chairlift.kernels.routing import ExpertSoftmax
from chairlift.models.reading.architecture import GGUFHeader
from chairlift.models.reading.config_fields import REQUIRED, ConfigFields, exact_quotient
from chairlift.models.reading.expert_fields import SOFTMAX_GATING, read_gguf_experts
from chairlift.models.reading.layer_fields import MAX_LAYERS, read_head_dim, repeat_windows
from chairlift.models.reading.llama_sizes import LlamaSizes
from chairlift.models.reading.rope_fields import WHOLE_HEAD, read_gguf_rope

GGUF_NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.layers.{}.input_layernorm": "blk.{}.attn_norm",
    "model.layers.{}.self_attn.q_proj": "blk.{}.attn_q",
    "model.layers.{}.self_attn.k_proj": "blk.{}.attn_k",
    "model.layers.{}.self_attn.v_proj": "blk.{}.attn_v",
    "model.layers.{}.self_attn.o_proj": "blk.{}.attn_output",
    "model.layers.{}.self_attn.q_norm": "blk.{}.attn_q_norm",
    "model.layers.{}.self_attn.k_norm": "blk.{}.attn_k_norm",
    "model.layers.{}.post_attention_layernorm": "blk.{}.ffn_norm",
    "model.layers.{}.mlp.gate_proj": "blk.{}.ffn_gate",
    "model.layers.{}.mlp.up_proj": "blk.{}.ffn_up",
    "model.layers.{}.mlp.down_proj": "blk.{}.ffn_down",
    "model.layers.{}.mlp.gate": "blk.{}.ffn_gate_inp",
    "model.layers.{}.mlp.experts.{}.gate_proj": "blk.{}.ffn_gate_exps",
    "model.layers.{}.mlp.experts.{}.up_proj": "blk.{}.ffn_up_exps",
    "model.layers.{}.mlp.experts.{}.down_proj": "blk.{}.ffn_down_exps",
    "model.norm": "output_norm",
    "lm_head": "output",
}
"""See Architecture.gguf_names."""


def read_gguf_sizes(
    header: GGUFHeader,
    *,
    has_longrope: bool = False,
    rotates_part: bool = False,
    expert_softmax: ExpertSoftmax | None = None,
    expert_gating: int = SOFTMAX_GATING,
    has_recurrence: bool = False,
    has_layer_sizes: bool = False,
    has_latent: bool = False,
    eps_key: str = "attention.layer_norm_rms_epsilon",
) -> LlamaSizes:
    """Read all sizes but the sliding windows, which every architecture stores in its own way.

    Args:
        has_longrope: whether the caller adds the factors of LongRoPE.
        rotates_part: whether a part of each head may be rotated.
        expert_softmax: see ExpertRouting; None for an architecture without experts.
        expert_gating: see read_gguf_experts.
        has_recurrence: whether layers may have no KV heads, and a part of each head may be rotated.
        has_latent: whether the values are a part of the keys, so that their sizes differ.
        has_layer_sizes: whether layers may have other KV heads and inner sizes than the first one, which are read here.
        eps_key: the field with the epsilon of norms.
    """
    fields, name, tensors = header.fields, header.name, header.tensor_names
    layers = fields.integer("block_count", high=MAX_LAYERS)
    heads = read_uniform(fields, "attention.head_count")
    read_layers = _read_first if has_layer_sizes else partial(read_uniform, ignores_zeros=has_recurrence)
    kv_heads = read_layers(fields, "attention.head_count_kv", heads)
    exact_quotient(fields, "attention.head_count", heads, "attention.head_count_kv", kv_heads)
    head_dim = read_head_dim(fields, "attention.key_length", "embedding_length", "attention.head_count", heads)
    if not has_latent:
        fields.allow_only("attention.value_length", head_dim, "K and V must have the same width")
    rotary_dim = fields.integer("rope.dimension_count", head_dim, high=head_dim)
    if not rotates_part and not has_recurrence:
        fields.allow_only("rope.dimension_count", head_dim, WHOLE_HEAD)
    rope_freqs = header.rope_factors.get("rope_freqs.weight")
    read_inner = _read_first if has_layer_sizes else read_uniform
    inner = read_inner(fields, "feed_forward_length", fields.get("expert_feed_forward_length") or REQUIRED)
    rope = read_gguf_rope(fields, head_dim, rope_freqs, has_longrope=has_longrope)
    return LlamaSizes(
        name=name,
        vocab_size=read_vocab_size(fields, header.tokens),
        hidden_size=fields.integer("embedding_length"),
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("context_length"),
        norm_eps=fields.number(eps_key, high=1.0),
        rope=replace(rope, rotary_dim=None if rotary_dim == head_dim else rotary_dim),
        tie_word_embeddings=bool(tensors) and "output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        experts=read_gguf_experts(fields, inner, expert_softmax, expert_gating),
    )


def read_uniform(fields: ConfigFields, key: str, default: Any = REQUIRED, *, ignores_zeros: bool = False) -> int:
    """Read an integer that some files repeat for each layer, and reject different values."""
    value = fields.get(key, default)
    if not isinstance(value, list):
        return fields.integer(key, default)
    if ignores_zeros:
        value = [item for item in value if item != 0]
    if not value or any(item != value[0] for item in value):
        raise fields.error(key, f"differs between layers ({value!r}), which is not supported")
    return fields.as_integer(key, value[0])


def _read_first(fields: ConfigFields, key: str, default: Any) -> int:
    """Read an integer of the first layer, or one for all of them."""
    value = fields.get(key, default)
    return fields.as_integer(key, value[0] if isinstance(value, list) and value else value)


def read_layers_without_kv(fields: ConfigFields, layers: int) -> list[bool]:
    """Read whether each layer has no KV heads, and so recurrent state."""
    key = "attention.head_count_kv"
    heads = fields.get(key)
    if not isinstance(heads, list) or len(heads) != layers:
        raise fields.error(key, f"must hold the number of KV heads of each of {layers} layers, got {heads!r:.80}")
    return [count == 0 for count in heads]


def read_vocab_size(fields: ConfigFields, tokens: ConfigFields) -> int:
    if fields.get("vocab_size") is not None:
        return fields.integer("vocab_size")
    strings = tokens.get("tokens")
    if not isinstance(strings, Sequence) or not strings:
        raise fields.error("vocab_size", "is missing, and so are the tokens (tokenizer.ggml.tokens)")
    return len(strings)


def read_gguf_windows(fields: ConfigFields, layers: int, window: int | None, pattern: int) -> Sequence[int | None]:
    """Read the window of each layer.

    `attention.sliding_window_pattern` is a number n (every n-th layer has no window) or a Boolean for each layer.

    Args:
        pattern: n in files that do not contain it.
    """
    key = "attention.sliding_window_pattern"
    value = fields.get(key)
    if not isinstance(value, list):
        return repeat_windows(layers, window, fields.integer(key, pattern))
    if len(value) != layers or not all(isinstance(item, bool) for item in value):
        raise fields.error(key, f"must be a number or hold true or false for each of {layers} layers, got {value!r}")
    return tuple(window if item else None for item in value)
