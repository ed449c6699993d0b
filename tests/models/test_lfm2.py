"""Checkpoints of LFM2: the fields of published files, and the errors of wrong ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from chairlift.config import EngineConfig
from chairlift.engine.startup.loaded_model import load_model
from chairlift.errors import ModelLoadError
from chairlift.models.registry import read_gguf_config, read_hf_config
from chairlift.models.torch_operations import torch_operations

LFM2_1B: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "intermediate_size": 12288,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "tie_embedding": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
LFM2_MOE: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "conv_L_cache": 3,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
    "vocab_size": 65536,
}
GGUF: dict[str, Any] = {
    "general.architecture": "lfm2",
    "lfm2.attention.head_count": 32,
    "lfm2.attention.head_count_kv": [0, 0, 8, 0],
    "lfm2.attention.layer_norm_rms_epsilon": 1e-5,
    "lfm2.block_count": 4,
    "lfm2.context_length": 128000,
    "lfm2.embedding_length": 2048,
    "lfm2.feed_forward_length": 8192,
    "lfm2.rope.freq_base": 1e6,
    "lfm2.shortconv.l_cache": 3,
    "lfm2.vocab_size": 65536,
}


def test_a_state_is_two_inputs_of_each_convolution() -> None:
    config = read_hf_config(LFM2_1B, source="config.json")
    assert sorted(config.attention_specs) == [2, 5, 8, 10, 12, 14]
    assert config.state_values_per_sequence == 10 * 2 * 2048
    assert config.layers[0].feed_forwards[0].inner_size == 8192
    assert config.tie_word_embeddings
    assert config.ropes[0][0].theta == 1e6


def test_experts_are_chosen_by_sigmoids_with_a_bias() -> None:
    config = read_hf_config(LFM2_MOE, source="config.json")
    assert [layer.mixture is None for layer in config.layers] == [True, True, False, False]
    mixture = config.layers[2].mixture
    assert mixture is not None
    assert mixture.router is not None
    assert mixture.router.selection_bias == "model.layers.2.feed_forward.expert_bias"
    assert mixture.router.routing.has_sigmoid
    assert torch_operations(config) == []


def test_gguf_files_have_no_kv_heads_in_layers_with_a_convolution() -> None:
    config = read_gguf_config(GGUF, source="model.gguf")
    assert sorted(config.attention_specs) == [2]
    assert config.attention_specs[2].num_kv_heads == 8


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (LFM2_1B, {"layer_types": ["conv"] * 15}, "layer_types must hold the type of each of 16 layers"),
        (LFM2_1B, {"layer_types": ["conv"] * 15 + ["mamba"]}, "contains 'mamba', .*; supported: conv, full_attention"),
        (LFM2_1B, {"full_attn_idxs": []}, "layer_types has no layer with attention"),
        (LFM2_1B, {"full_attn_idxs": None}, "layer_types is missing, and so is full_attn_idxs"),
        (LFM2_1B, {"conv_L_cache": 1}, "conv_L_cache must be an integer between 2 and 16, got 1"),
        (LFM2_1B, {"conv_dim": 1024}, "conv_dim is 1024, which is not supported: LFM2 models have 2048 here"),
        (LFM2_1B, {"use_pos_enc": False}, "use_pos_enc is False, which is not supported"),
        (LFM2_1B, {"block_use_swiglu": False}, "block_use_swiglu is False, which is not supported"),
        (LFM2_MOE, {"num_dense_layers": 5}, "num_dense_layers must be an integer between 0 and 4, got 5"),
        (LFM2_MOE, {"num_experts_per_tok": 33}, "num_experts_per_tok must be an integer between 1 and 32, got 33"),
    ],
)  # fmt: skip
def test_errors_name_the_field(model: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_hf_config({**model, **changes}, source="config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lfm2.attention.head_count_kv": 8}, "head_count_kv must hold the number of KV heads of each of 4 layers"),
        ({"lfm2.attention.head_count_kv": [0, 4, 8, 0]}, "head_count_kv differs between layers"),
        ({"lfm2.attention.head_count_kv": [0, 0, 0, 0]}, "head_count_kv differs between layers"),
        ({"lfm2.shortconv.l_cache": None}, "shortconv.l_cache is missing"),
    ],
)  # fmt: skip
def test_errors_name_the_key_of_a_gguf_file(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_gguf_config({**GGUF, **changes}, source="model.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, r"tensor model.layers.0.conv.conv.weight is missing"),
        (slice(0, 2), r"conv.conv.weight has the shape \(64, 1, 2\), but the configuration requires \(64, 1, 3\)"),
    ],
)
def test_a_missing_or_narrow_convolution_is_an_error(
    tiny_model_dir: Callable[..., Path], tmp_path: Path, change: slice | None, message: str
) -> None:
    folder = shutil.copytree(tiny_model_dir("lfm2"), tmp_path / "copy")
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.conv.conv.weight"
    whole = tensors.pop(name)
    if change is not None:
        tensors[name] = whole[..., change].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load_model(EngineConfig(model=str(folder), skip_tokenizer_init=True, num_threads=1))
