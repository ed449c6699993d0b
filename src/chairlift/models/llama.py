"""Llama (Touvron et al., 2023), Mistral, Qwen2 and Qwen3: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

    x + attention(norm(x)), then x + down(silu(gate(norm(x))) * up(norm(x)))

Mistral adds a sliding window, Qwen2 biases of q, k and v, and Qwen3 a norm of each query and key head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from chairlift.models.architecture import Architecture, GGUFHeader
from chairlift.models.config_fields import REQUIRED, ConfigFields, exact_quotient
from chairlift.models.declaration import (
    ATTENTION,
    EMBEDDING,
    LM_HEAD,
    MLP,
    AttentionSpec,
    BranchNorms,
    FeedForwardSpec,
    HeadNormSpec,
    LayerSpec,
    MatrixSpec,
    ModelConfig,
    NormSpec,
    RopeConfig,
)
from chairlift.models.rope_fields import WHOLE_HEAD, read_gguf_rope, read_rope

MAX_LAYERS: Final = 4096

# -- the declaration -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSizes:
    """The sizes and switches of a Llama, Mistral, Qwen2 or Qwen3 model.

    Attributes:
        name: "llama", "mistral", "qwen2" or "qwen3".
        sliding_windows: the window of each layer, or None for full attention; an empty sequence for none in any layer.
        qkv_bias, output_bias, mlp_bias: whether these projections have biases.
        qk_norm: whether RMSNorm is applied to each query and key head.
        dtype: see ModelConfig.
    """

    name: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    sliding_windows: Sequence[int | None] = ()
    activation: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"

    def declare(self) -> ModelConfig:
        """Return the declaration of the model with these sizes."""
        return ModelConfig(
            architecture="llama",
            name=self.name,
            hidden_size=self.hidden_size,
            max_position_embeddings=self.max_position_embeddings,
            embedding=MatrixSpec(EMBEDDING, EMBEDDING, (("model.embed_tokens", self.vocab_size),), self.hidden_size),
            layers=tuple(self._layer(index) for index in range(self.num_layers)),
            head=MatrixSpec(LM_HEAD, LM_HEAD, (("lm_head", self.vocab_size),), self.hidden_size),
            final_norm=self._norm("model.norm"),
            tie_word_embeddings=self.tie_word_embeddings,
            dtype=self.dtype,
        )

    def _layer(self, index: int) -> LayerSpec:
        prefix = f"model.layers.{index}"
        return LayerSpec(
            attention=self._attention(f"{prefix}.self_attn", index),
            attention_norms=BranchNorms(before=self._norm(f"{prefix}.input_layernorm")),
            feed_forward=self._feed_forward(f"{prefix}.mlp"),
            feed_forward_norms=BranchNorms(before=self._norm(f"{prefix}.post_attention_layernorm")),
        )

    def _attention(self, prefix: str, index: int) -> AttentionSpec:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv = ((f"{prefix}.q_proj", queries), (f"{prefix}.k_proj", keys), (f"{prefix}.v_proj", keys))
        output = ((f"{prefix}.o_proj", self.hidden_size),)
        return AttentionSpec(
            qkv=MatrixSpec(ATTENTION, "qkv", qkv, self.hidden_size, self.qkv_bias),
            output=MatrixSpec(ATTENTION, "output", output, queries, self.output_bias),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            rope=self.rope,
            sliding_window=self.sliding_windows[index] if self.sliding_windows else None,
            head_norm=HeadNormSpec(f"{prefix}.q_norm", f"{prefix}.k_norm", self.norm_eps) if self.qk_norm else None,
        )

    def _feed_forward(self, prefix: str) -> FeedForwardSpec:
        inner = self.intermediate_size
        gate_up = ((f"{prefix}.gate_proj", inner), (f"{prefix}.up_proj", inner))
        down = ((f"{prefix}.down_proj", self.hidden_size),)
        return FeedForwardSpec(
            up=MatrixSpec(MLP, "gate_up", gate_up, self.hidden_size, self.mlp_bias),
            down=MatrixSpec(MLP, "down", down, inner, self.mlp_bias),
            activation=self.activation,
            gated=True,
        )

    def _norm(self, name: str) -> NormSpec:
        return NormSpec("rms_norm", name, self.hidden_size, self.norm_eps)


# -- config.json -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _HFConfigReader:
    """The reader of the `config.json` of one model type.

    Attributes:
        windows: (fields, number of layers) -> the sliding window of each layer.
        qkv_bias: whether q, k and v have biases, or None to read `attention_bias`, which applies to the output
            projection too.
    """

    name: str
    windows: Callable[[ConfigFields, int], Sequence[int | None]]
    qkv_bias: bool | None = None
    reads_mlp_bias: bool = False
    qk_norm: bool = False

    def __call__(self, fields: ConfigFields) -> ModelConfig:
        layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
        heads = fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", heads)
        exact_quotient(fields, "num_attention_heads", heads, "num_key_value_heads", kv_heads)
        qkv_bias, output_bias, mlp_bias = self._biases(fields)
        return LlamaSizes(
            name=self.name,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_head_dim(fields, "head_dim", "hidden_size", "num_attention_heads", heads),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            norm_eps=fields.number("rms_norm_eps", high=1.0),
            sliding_windows=self.windows(fields, layers),
            activation=fields.choice("hidden_act", ("silu",), "silu"),
            rope=_rope(fields),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            qk_norm=self.qk_norm,
        ).declare()

    def _biases(self, fields: ConfigFields) -> tuple[bool, bool, bool]:
        """Return whether q, k and v, the output projection, and the feed-forward network have biases.

        A field that the reference implementation of the model type ignores must be absent or agree with it.
        """
        why = f"{self.name} models do not have this option"
        if not self.reads_mlp_bias:
            fields.allow_only("mlp_bias", False, why)
        mlp = fields.flag("mlp_bias", False)
        if self.qkv_bias is None:
            bias = fields.flag("attention_bias", False)
            return bias, bias, mlp
        fields.allow_only("attention_bias", self.qkv_bias, why)
        return self.qkv_bias, False, mlp


def _head_dim(fields: ConfigFields, key: str, hidden_key: str, heads_key: str, heads: int) -> int:
    """Read the head size at `key`; if it is absent, it is the hidden size divided by the number of heads."""
    if fields.get(key) is None:
        head_dim = exact_quotient(fields, hidden_key, fields.integer(hidden_key), heads_key, heads)
    else:
        head_dim = fields.integer(key, high=4096)
    if head_dim % 2:
        raise fields.error(key, f"must be even for rotary embeddings, got {head_dim}")
    return head_dim


def _rope(fields: ConfigFields) -> RopeConfig:
    fields.allow_only("rope_interleaved", False, "the dimensions of a rotated pair must be half a head apart")
    return read_rope(fields)


def _no_windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    fields.allow_only("sliding_window", None, "this architecture has no sliding window")
    return ()


def _mistral_windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    window = None if fields.get("sliding_window") is None else fields.integer("sliding_window")
    return (window,) * layers


def _qwen_windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    uses_windows = fields.flag("use_sliding_window", False)
    window = fields.integer("sliding_window") if uses_windows else fields.get("sliding_window")
    fields.get("max_window_layers")  # Marks the field as read; it has no effect without windows.
    types = fields.get("layer_types")
    if types is not None:
        return _typed_windows(fields, types, layers, window if uses_windows else None)
    if not uses_windows:
        return ()
    first = fields.integer("max_window_layers", low=0)
    return tuple(window if layer >= first else None for layer in range(layers))


def _typed_windows(fields: ConfigFields, types: Any, layers: int, window: int | None) -> Sequence[int | None]:
    known: dict[str, int | None] = {"full_attention": None}
    if window is not None:
        known = {"sliding_attention": window, **known}
    if (
        not isinstance(types, list)
        or len(types) != layers
        or not all(isinstance(kind, str) and kind in known for kind in types)
    ):
        raise fields.error("layer_types", f"must hold {layers} of {', '.join(known)}, got {types!r}")
    return tuple(known[kind] for kind in types)


# -- GGUF ------------------------------------------------------------------------------------------------------------


def read_llama_gguf(header: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file of Llama, Qwen2 or Qwen3."""
    fields, name, tensors = header.fields, header.name, header.tensor_names
    fields.allow_only("expert_count", 0, "mixtures of experts are not supported")
    fields.allow_only("expert_used_count", 0, "mixtures of experts are not supported")
    layers = fields.integer("block_count", high=MAX_LAYERS)
    heads = _uniform(fields, "attention.head_count")
    kv_heads = _uniform(fields, "attention.head_count_kv", heads)
    exact_quotient(fields, "attention.head_count", heads, "attention.head_count_kv", kv_heads)
    head_dim = _head_dim(fields, "attention.key_length", "embedding_length", "attention.head_count", heads)
    fields.allow_only("attention.value_length", head_dim, "K and V must have the same width")
    fields.allow_only("rope.dimension_count", head_dim, WHOLE_HEAD)
    return LlamaSizes(
        name=name,
        vocab_size=_vocab_size(fields, header.tokens),
        hidden_size=fields.integer("embedding_length"),
        intermediate_size=_uniform(fields, "feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("context_length"),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", high=1.0),
        sliding_windows=_gguf_windows(fields, layers),
        rope=read_gguf_rope(fields, head_dim, header.rope_freqs),
        tie_word_embeddings=bool(tensors) and "output.weight" not in tensors,
        qkv_bias=name == "qwen2" or "blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm=name == "qwen3",
    ).declare()


def _uniform(fields: ConfigFields, key: str, default: Any = REQUIRED) -> int:
    """Read an integer that some files repeat for each layer, and reject different values."""
    value = fields.get(key, default)
    if not isinstance(value, list):
        return fields.integer(key, default)
    if not value or any(item != value[0] for item in value):
        raise fields.error(key, f"differs between layers ({value!r}), which is not supported")
    return fields.as_integer(key, value[0])


def _vocab_size(fields: ConfigFields, tokens: ConfigFields) -> int:
    if fields.get("vocab_size") is not None:
        return fields.integer("vocab_size")
    strings = tokens.get("tokens")
    if not isinstance(strings, Sequence) or not strings:
        raise fields.error("vocab_size", "is missing, and so are the tokens (tokenizer.ggml.tokens)")
    return len(strings)


def _gguf_windows(fields: ConfigFields, layers: int) -> Sequence[int | None]:
    fields.allow_only("attention.sliding_window_pattern", None, "all layers must have the same window")
    window = fields.integer("attention.sliding_window", 0, low=0)
    return (window or None,) * layers


LLAMA: Final = Architecture(
    name="llama",
    hf_readers={
        "LlamaForCausalLM": _HFConfigReader("llama", _no_windows, reads_mlp_bias=True),
        "MistralForCausalLM": _HFConfigReader("mistral", _mistral_windows, qkv_bias=False),
        "Qwen2ForCausalLM": _HFConfigReader("qwen2", _qwen_windows, qkv_bias=True),
        "Qwen3ForCausalLM": _HFConfigReader("qwen3", _qwen_windows, qk_norm=True),
    },
    gguf_readers=dict.fromkeys(("llama", "qwen2", "qwen3"), read_llama_gguf),
    gguf_names={
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
        "model.norm": "output_norm",
        "lm_head": "output",
    },
    gguf_interleaved=frozenset(("llama",)),
)
