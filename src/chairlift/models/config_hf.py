"""Hugging Face `config.json` -> ModelConfig. Keys are those of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from chairlift.models.config import ModelConfig, RopeConfig
from chairlift.models.config_fields import REQUIRED, Fields, divide, unique

DTYPES = ("float32", "float16", "bfloat16")
NO_QUANTIZED = "quantized checkpoints are read from GGUF files only; take the unquantized model or a GGUF"


def read_hf(config: Mapping[str, Any], source: str, generation_config: Mapping[str, Any]) -> ModelConfig:
    """See ModelConfig.from_hf."""
    fields = Fields(config, source)
    reader = READERS[_architecture(fields)]
    fields.refuse("quantization_config", None, NO_QUANTIZED)
    generation = Fields(generation_config, source.replace("config.json", "generation_config.json"))
    bos = fields.token_ids("bos_token_id")
    return replace(
        reader(fields),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=unique(fields.token_ids("eos_token_id"), generation.token_ids("eos_token_id")),
        dtype=_dtype(fields),
    )


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures", REQUIRED)
    for name in names if isinstance(names, list) else [names]:
        if isinstance(name, str) and name in READERS:
            return name
    raise fields.fail("architectures", f"is {names!r}, which is not supported; supported: {', '.join(READERS)}")


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    return fields.choice(key, DTYPES, "float32")


@dataclass(frozen=True)
class _Family:
    """What a gated, rotary decoder (Llama and its kin) leaves to its family.

    `qkv_bias` None reads `attention_bias`, which then covers the o projection too.
    """

    name: str
    qkv_bias: bool | None = None
    mlp_bias: bool = False
    qk_norm: bool = False
    default_tied: bool = False
    windows: Callable[[Fields, int], tuple[int | None, ...]] = lambda fields, layers: (None,) * layers

    def __call__(self, fields: Fields) -> ModelConfig:
        hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers", high=4096)
        heads = fields.integer("num_attention_heads")
        head_dim = _head_dim(fields, hidden, heads)
        bias = fields.flag("attention_bias", False) if self.qkv_bias is None else self.qkv_bias
        return ModelConfig(
            architecture="llama",
            name=self.name,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=_kv_heads(fields, heads),
            head_dim=head_dim,
            max_position_embeddings=fields.integer("max_position_embeddings"),
            norm_eps=fields.number("rms_norm_eps", high=1.0),
            sliding_windows=self.windows(fields, layers),
            activation=fields.choice("hidden_act", ("silu",), "silu"),
            rope=read_rope(fields),
            tie_word_embeddings=fields.flag("tie_word_embeddings", self.default_tied),
            attention_bias=bias,
            attention_output_bias=bias and self.qkv_bias is None,
            mlp_bias=fields.flag("mlp_bias", False) if self.mlp_bias else False,
            qk_norm=self.qk_norm,
        )


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if fields.get("head_dim") is None:
        head_dim = divide(fields, "hidden_size", hidden, "num_attention_heads", heads)
    else:
        head_dim = fields.integer("head_dim", high=4096)
    if head_dim % 2:
        raise fields.fail("head_dim", f"must be even for rotary embeddings, got {head_dim}")
    return head_dim


def _kv_heads(fields: Fields, heads: int) -> int:
    kv_heads = fields.integer("num_key_value_heads", heads)
    divide(fields, "num_attention_heads", heads, "num_key_value_heads", kv_heads)
    return kv_heads


def _mistral_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    window = None if fields.get("sliding_window") is None else fields.integer("sliding_window")
    return (window,) * layers


def _qwen_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    if not fields.flag("use_sliding_window", False):
        return (None,) * layers
    window = fields.integer("sliding_window")
    types = fields.get("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", low=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    known = {"sliding_attention": window, "full_attention": None}
    if (
        not isinstance(types, list)
        or len(types) != layers
        or not all(isinstance(kind, str) and kind in known for kind in types)
    ):
        raise fields.fail("layer_types", f"must hold {layers} of {', '.join(known)}, got {types!r}")
    return tuple(known[kind] for kind in types)


def read_rope(fields: Fields) -> RopeConfig:
    """Transformers 5 writes `rope_parameters`; before, there were `rope_theta` and `rope_scaling`."""
    fields.refuse("partial_rotary_factor", 1.0, "rotation must cover the whole head")
    scaling = fields.mapping("rope_parameters") or fields.mapping("rope_scaling")
    if scaling is None:
        return RopeConfig(theta=fields.number("rope_theta", 10000.0))
    scaling.refuse("partial_rotary_factor", 1.0, "rotation must cover the whole head")
    key = "type" if scaling.get("rope_type") is None else "rope_type"
    kind = scaling.choice(key, ("default", "linear", "llama3"), "default")
    base = fields if scaling.get("rope_theta") is None else scaling
    rope = RopeConfig(theta=base.number("rope_theta", 10000.0))
    if kind == "default":
        return rope
    rope = replace(rope, scaling=kind, factor=scaling.number("factor"))
    return rope if kind == "linear" else _llama3(rope, scaling)


def _llama3(rope: RopeConfig, scaling: Fields) -> RopeConfig:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise scaling.fail("low_freq_factor", f"({low:g}) must be below high_freq_factor ({high:g})")
    original = scaling.integer("original_max_position_embeddings")
    return replace(rope, low_freq_factor=low, high_freq_factor=high, original_max_position_embeddings=original)


def _opt(fields: Fields) -> ModelConfig:
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers", high=4096)
    heads = fields.integer("num_attention_heads")
    fields.refuse("layer_norm_elementwise_affine", True, "layer norms must have weights")
    norm_before, bias = fields.flag("do_layer_norm_before", True), fields.flag("enable_bias", True)
    projection = fields.integer("word_embed_proj_dim", hidden)
    return ModelConfig(
        architecture="opt",
        name="opt",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("ffn_dim"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=divide(fields, "hidden_size", hidden, "num_attention_heads", heads),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        norm_eps=1e-5,
        sliding_windows=(None,) * layers,
        activation=fields.choice("activation_function", ("relu",), "relu"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bias,
        word_embed_proj_dim=None if projection == hidden else projection,
        norm_before=norm_before,
        final_norm=norm_before and not fields.flag("_remove_final_layer_norm", False),
    )


READERS: dict[str, Callable[[Fields], ModelConfig]] = {
    "LlamaForCausalLM": _Family("llama", mlp_bias=True),
    "MistralForCausalLM": _Family("mistral", qkv_bias=False, windows=_mistral_windows),
    "Qwen2ForCausalLM": _Family("qwen2", qkv_bias=True, windows=_qwen_windows),
    "Qwen3ForCausalLM": _Family("qwen3", qk_norm=True, windows=_qwen_windows),
    "OPTForCausalLM": _opt,
}
