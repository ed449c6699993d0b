"""Checkpoints of Gemma 2 and Gemma 3: the fields of both file formats, and models with images."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_gguf_parity import GGUF_FIELDS, write_gguf

from chairlift.errors import ModelLoadError
from chairlift.loading.resolve import resolve_model
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.registry import read_hf_config

TinyModelDir = Callable[..., Path]


def windows_of(config: ModelConfig) -> list[int | None]:
    return [layer.attention.sliding_window for layer in config.layers]


def test_gguf_defaults(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    """Every second layer of Gemma 2 has no window, every sixth of Gemma 3, whose other layers have a base of 10,000."""
    absent = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"))
    config = resolve_model(str(write_gguf(tiny_model_dir("gemma2"), "gemma2", tmp_path / "2.gguf", **absent))).config()
    assert windows_of(config) == [20, None, 20, None]
    assert (config.layers[0].attention.logits_soft_cap, config.logits_soft_cap) == (50, 30)
    absent = dict.fromkeys(key for key in GGUF_FIELDS["gemma3"] if key.startswith("rope.") or key.endswith("pattern"))
    changed = {**absent, "rope.freq_base": 1e6, "block_count": 12}
    config = resolve_model(str(write_gguf(tiny_model_dir("gemma3"), "gemma3", tmp_path / "3.gguf", **changed))).config()
    assert windows_of(config) == ([20] * 5 + [None]) * 2
    assert {layer.attention.rope for layer in config.layers[:5]} == {RopeConfig(theta=10000.0)}
    assert config.layers[5].attention.rope == RopeConfig(theta=1e6)


@pytest.mark.parametrize(("arch", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_gguf_files_of_27b_have_another_scale(
    arch: str, num_layers: int, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    changes = {"block_count": num_layers, "attention.sliding_window_pattern": None}
    path = write_gguf(tiny_model_dir(arch), arch, tmp_path / "model.gguf", **changes)
    assert resolve_model(str(path)).config().layers[0].attention.scale == pytest.approx((64 / 4) ** -0.5)


@pytest.mark.parametrize("pattern", [[True, False], ["a", "b", "c", "d"], "six", 0])
def test_wrong_patterns_are_errors(pattern: Any, tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    changes = {"attention.sliding_window_pattern": pattern}
    path = write_gguf(tiny_model_dir("gemma3"), "gemma3", tmp_path / "model.gguf", **changes)
    with pytest.raises(ModelLoadError, match=r"gemma3\.attention\.sliding_window_pattern must"):
        resolve_model(str(path)).config()


GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
"""The fields of the published model of 4 billion parameters."""

GEMMA2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}


def test_fields_of_the_published_gemma3_with_images() -> None:
    config = read_hf_config(GEMMA3_4B, source="config.json")
    assert (config.architecture, config.num_layers, config.vocab_size) == ("gemma3", 34, 262_208)
    assert (config.dtype, config.eos_token_ids, config.max_position_embeddings) == ("bfloat16", (1, 106), 131_072)
    assert config.embedding_multiplier == math.sqrt(2560)
    assert config.tie_word_embeddings
    assert windows_of(config)[:7] == [1024] * 5 + [None, 1024]
    local, whole = config.layers[0].attention, config.layers[5].attention
    assert (local.num_heads, local.num_kv_heads, local.head_dim, local.scale) == (8, 4, 256, 1 / 16)
    assert local.rope == RopeConfig(theta=10_000.0)
    assert whole.rope == RopeConfig(theta=1_000_000.0, scaling="linear", factor=8.0)
    assert all(norm.weight_offset == 1 for layer in config.layers for norm in layer.norms)


def test_fields_of_the_published_gemma2() -> None:
    config = read_hf_config(GEMMA2_2B, source="config.json")
    assert (config.architecture, config.num_layers, config.logits_soft_cap) == ("gemma2", 26, 30.0)
    assert windows_of(config)[:4] == [4096, None, 4096, None]
    assert {layer.attention.logits_soft_cap for layer in config.layers} == {50.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config is missing"),
        ({"text_config": {"num_experts": 4}}, r"text_config\.num_experts is 4, and the gemma3 architecture"),
        ({"text_config": {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}}, r"rope_scaling\.rope_type is 'ntk'"),
        ({"text_config": {"attn_logit_softcapping": 50.0}}, "attn_logit_softcapping is 50.0, which is not supported"),
        ({"text_config": {"use_bidirectional_attention": True}}, "attention must be causal"),
        ({"text_config": {"hidden_activation": "relu"}}, "hidden_activation is 'relu', which is not supported"),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_hf_config({**GEMMA3_4B, **changes}, source="config.json")


def test_published_fields_of_version_4_equal_those_of_version_5(tiny_model_dir: TinyModelDir) -> None:
    new = json.loads((tiny_model_dir("gemma3") / "config.json").read_text())
    old = {
        key: value
        for key, value in new.items()
        if key not in ("rope_parameters", "layer_types", "_sliding_window_pattern")
    }
    old |= {"rope_theta": 50000.0, "rope_local_base_freq": 300.0, "sliding_window_pattern": 3}
    old |= {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    first, second = (read_hf_config(config, source="config.json") for config in (new, old))
    assert replace(first, dtype="") == replace(second, dtype="")
