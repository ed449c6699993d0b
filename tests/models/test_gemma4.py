"""Checkpoints of Gemma 4: the fields of both file formats, models with images, shared K and V, and experts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_gguf_parity import assert_logits_of_transformers, load, write_gguf

from chairlift.engine.startup.pool_plan import kv_slot_bytes
from chairlift.errors import ModelLoadError
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.devices import Device
from chairlift.lab.sim.model_shape import ModelShape
from chairlift.lab.sim.roofline import Roofline
from chairlift.loading.resolve import resolve_model
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.registry import read_gguf_config, read_hf_config

TinyModelDir = Callable[..., Path]

E2B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "audio_config": {"hidden_size": 1024, "model_type": "gemma4_audio"},
    "audio_token_id": 258881,
    "boa_token_id": 256000,
    "boi_token_id": 255999,
    "dtype": "bfloat16",
    "eoa_token_id": 258883,
    "eoa_token_index": 258883,
    "eoi_token_id": 258882,
    "eos_token_id": [1, 106],
    "image_token_id": 258880,
    "model_type": "gemma4",
    "text_config": {
        "attention_bias": False,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "max_position_embeddings": 131072,
        "model_type": "gemma4_text",
        "num_attention_heads": 8,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 512,
        "use_double_wide_mlp": True,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
    "video_token_id": 258884,
    "vision_config": {"hidden_size": 768, "model_type": "gemma4_vision"},
    "vision_soft_tokens_per_image": 280,
}
"""The fields of the published model with 2 billion effective parameters."""


def read_e2b(**changes: Any) -> Any:
    return read_hf_config({**E2B, "text_config": {**E2B["text_config"], **changes}}, source="config.json")


def test_fields_of_the_published_e2b() -> None:
    config = read_e2b()
    assert (config.architecture, config.num_layers, config.vocab_size) == ("gemma4", 35, 262_144)
    assert (config.bos_token_id, config.eos_token_ids, config.logits_soft_cap) == (2, (1, 106), 30.0)
    assert config.embedding_multiplier == math.sqrt(1536)
    inputs = config.per_layer_inputs
    assert inputs is not None
    assert (inputs.size, inputs.table.in_features, inputs.table_multiplier) == (256, 35 * 256, 16.0)
    local, whole = config.layers[0].attention, config.layers[4].attention
    assert (local.sliding_window, local.head_dim, local.num_kv_heads, local.scale) == (512, 256, 1, 1.0)
    assert (whole.sliding_window, whole.head_dim, whole.num_kv_heads) == (None, 512, 1)
    assert local.rope == RopeConfig(theta=10_000.0)
    assert whole.rope == RopeConfig(theta=1e6, scaling="factors", freq_factors=(1.0,) * 64 + (1e30,) * 192)
    sources = [layer.attention.kv_source for layer in config.layers]
    assert sources == [None] * 15 + [13, 13, 13, 13, 14] * 4
    assert [layer.feed_forward.inner_size for layer in config.layers] == [6144] * 15 + [12288] * 20
    assert [len(layer.attention.qkv.parts) for layer in config.layers] == [3] * 15 + [1] * 20


def test_declarations_are_sent_to_other_processes(tiny_model_dir: TinyModelDir) -> None:
    for config in (read_e2b(), resolve_model(str(tiny_model_dir("gemma4_moe"))).config()):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ModelConfig) == config


def test_heads_of_the_published_31b() -> None:
    """Layers with full attention have fewer KV heads, and no projection of values."""
    changes = {"num_key_value_heads": 4, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
    config = read_e2b(**changes, num_kv_shared_layers=0, hidden_size_per_layer_input=None)
    local, whole = config.layers[0].attention, config.layers[4].attention
    assert ([out for _, out in local.qkv.parts], local.num_kv_heads) == ([2048, 1024, 1024], 4)
    assert ([out for _, out in whole.qkv.parts], whole.num_kv_heads) == ([4096, 1024], 2)
    assert config.per_layer_inputs is None
    assert {layer.per_layer_branch for layer in config.layers} == {None}


def test_fields_of_transformers_5_equal_published_fields(tiny_model_dir: TinyModelDir) -> None:
    new = json.loads((tiny_model_dir("gemma4") / "config.json").read_text())
    changed = new.pop("per_layer_config")
    assert changed["1"] == {"head_dim": 24, "num_key_value_heads": 1}
    old = {**new, "global_head_dim": 24, "num_global_key_value_heads": 1}
    first, second = (
        read_hf_config(config, source="config.json") for config in ({**new, "per_layer_config": changed}, old)
    )
    assert first == second


def test_defaults_of_layer_types_and_rope(tiny_model_dir: TinyModelDir) -> None:
    config = read_e2b(layer_types=None, rope_parameters=None, num_hidden_layers=8, num_kv_shared_layers=0)
    assert [layer.attention.sliding_window for layer in config.layers] == [512] * 5 + [None, 512, None]
    assert config.layers[5].attention.rope == read_e2b().layers[4].attention.rope


def test_defaults_of_the_published_12b() -> None:
    text = {
        key: value
        for key, value in E2B["text_config"].items()
        if key
        not in ("hidden_size_per_layer_input", "max_position_embeddings", "num_kv_shared_layers", "sliding_window")
    }
    fields = {**E2B, "architectures": ["Gemma4UnifiedForConditionalGeneration"], "text_config": text}
    text["model_type"] = "gemma4_unified_text"
    config = read_hf_config(fields, source="config.json")
    assert (config.max_position_embeddings, config.layers[0].attention.sliding_window) == (262_144, 1024)
    assert config.per_layer_inputs is None
    text["hidden_size_per_layer_input"] = 256
    with pytest.raises(ModelLoadError, match="hidden_size_per_layer_input is 256, which is not supported"):
        read_hf_config(fields, source="config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "num_experts is missing"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts must be .* 4, got 5"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which is not supported"),
        ({"use_bidirectional_attention": "all"}, "attention must be causal"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu', which is not supported"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers must be an integer between 0 and 34, got 35"),
        ({"num_kv_shared_layers": 31}, "num_kv_shared_layers is 31, but no layer before layer 4 has the type of layer"),
        ({"layer_types": ["full_attention"] * 34 + ["sliding_attention"]}, "must end with full_attention, got 'slid"),
        ({"vocab_size_per_layer_input": 9}, "must be at least vocab_size=262144, got 9"),
        ({"per_layer_config": {"20": {"num_key_value_heads": 2}}}, "layer 20 read the K and V of layer .* has 2 of"),
        ({"per_layer_config": {"3": {"intermediate_size": 8}}}, r"per_layer_config\.3\.intermediate_size is 8, and"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "rope_parameters has no full_attention"),
        ({"altup_num_inputs": 4}, r"text_config\.altup_num_inputs is 4, and the gemma4 architecture"),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_e2b(**changes)


def test_layers_that_share_k_and_v_keep_none() -> None:
    """12 layers with a window keep 2 x 256 values of a token, and 3 others 2 x 512; all 35 read some."""
    config = read_e2b()
    num_values = 12 * 2 * 256 + 3 * 2 * 512
    assert config.kv_values_per_token == num_values
    assert kv_slot_bytes(config, "int8") == num_values + 15 * 8
    shape = ModelShape("E2B", config)
    assert shape.kv_bytes_per_slot == 2 * num_values
    cost = Roofline(shape, Device("plain", 1.0, 1.0, 1, "made up", flops_efficiency=1, bandwidth_efficiency=1))
    seconds = [cost.seconds(StepShape(0, 0, 0, num_context, 0)) for num_context in (0, 1 << 20)]
    assert (seconds[1] - seconds[0]) / (1 << 20) == pytest.approx(2 * (28 * 2 * 256 + 7 * 2 * 512))


def with_unneeded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add the projections that published files contain for layers that read K and V of others."""
    added = {f"model.layers.4.self_attn.{name}.weight": torch.ones(32, 64) for name in ("k_proj", "v_proj")}
    return {**tensors, **added, "model.layers.4.self_attn.k_norm.weight": torch.ones(16)}


@pytest.mark.parametrize("arch", ["gemma4", "gemma4_moe"])
def test_the_text_model_of_a_model_with_images(arch: str, tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    folder = tiny_model_dir(arch)
    text = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(folder / "model.safetensors")
    tensors = with_unneeded(tensors) if arch == "gemma4" else tensors
    named = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in tensors.items()}
    images = {f"model.{name}.a.weight": torch.ones(3) for name in ("vision_tower", "vision_embedder", "embed_audio")}
    save_file(named | images, tmp_path / "model.safetensors")
    assert_logits_of_transformers(load(tmp_path), folder)


def test_projections_are_needed_in_layers_with_k_and_v(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    folder = tiny_model_dir("gemma4")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    added = {"model.layers.1.self_attn.v_proj.weight": torch.ones(24, 64)}
    save_file(load_file(folder / "model.safetensors") | added, tmp_path / "model.safetensors")
    with pytest.raises(AssertionError, match=r"model\.layers\.1\.self_attn\.v_proj\.weight"):
        load(tmp_path)


GGUF_OVERRIDES: dict[str, Any] = {"vocab_size_per_layer_input": 256}


@pytest.mark.parametrize(
    ("tensor", "parts"), [("ffn_gate_up_exps", ["gate_up_proj"]), ("ffn_gate_exps", ["gate_proj", "up_proj"])]
)
def test_gguf_files_have_gate_and_up_projections_of_experts_in_one_or_two_tensors(
    tensor: str, parts: list[str]
) -> None:
    fields = {
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 20,
        "block_count": 6,
        "context_length": 256,
        "embedding_length": 64,
        "expert_count": 5,
        "expert_feed_forward_length": 40,
        "expert_used_count": 2,
        "feed_forward_length": 96,
        "vocab_size": 256,
    }
    metadata = {"general.architecture": "gemma4", **{f"gemma4.{key}": value for key, value in fields.items()}}
    config = read_gguf_config(metadata, source="model.gguf", tensor_names=[f"blk.0.{tensor}.weight"])
    mixture = config.layers[3].mixture
    assert mixture is not None
    assert mixture.up.parts == tuple((f"model.layers.3.experts.{{}}.{part}", 80 // len(parts)) for part in parts)
    assert mixture.router is not None
    assert mixture.router.expert_scales == "model.layers.3.router.per_expert_scale"
    assert config.layers[3].feed_forward.inner_size == 96


def without_rope(config: ModelConfig) -> ModelConfig:
    layers = (replace(layer, attention=replace(layer.attention, rope=None)) for layer in config.layers)
    return replace(config, layers=tuple(layers))


def test_gguf_declares_the_same_model_as_config_json(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    eps = 2.0**-20  # A number that is the same in float32.
    folder = tiny_model_dir("gemma4", **GGUF_OVERRIDES, rms_norm_eps=eps)
    expected = resolve_model(str(folder)).config()
    changes = {"attention.layer_norm_rms_epsilon": eps}
    found = resolve_model(str(write_gguf(folder, "gemma4", tmp_path / "model.gguf", **changes))).config()
    (factors,) = {layer.attention.rope.freq_factors for layer in found.layers[1::2] if layer.attention.rope}
    assert factors == pytest.approx((1.0,) * 4 + (1e30,) * 8)  # In float32.
    unspecified = {"bos_token_id": None, "eos_token_ids": ()}
    assert without_rope(found) == replace(without_rope(expected), **unspecified)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_used_count": 8}, "expert_used_count is 8, and the gemma4 architecture does not declare"),
        ({"expert_count": 8}, "expert_used_count is missing"),
        ({"attention.sliding_window": 0}, "attention.sliding_window must be an integer between 1 and .*, got 0"),
        ({"attention.shared_kv_layers": 6}, "shared_kv_layers must be an integer between 0 and 5, got 6"),
        ({"attention.head_count_kv": [2, 2, 2, 2, 1, 2]}, "layer 4 read the K and V of layer .*, but layer 4 has 1 of"),
        ({"attention.value_length_swa": 8}, "value_length_swa is 8, which is not supported"),
        ({"rope.dimension_count": 8}, "rope.dimension_count is 8, which is not supported"),
        ({"feed_forward_length": [96, 96]}, r"feed_forward_length must hold 6 numbers, got \[96, 96\]"),
        ({"attention.head_count_kv": 3}, r"attention\.head_count \(4\) must be a multiple of attention\.head_count_kv"),
        ({"altup.num_inputs": 4}, r"gemma4\.altup\.num_inputs is 4, and the gemma4 architecture"),
    ],
)
def test_errors_in_gguf_files_name_the_field(
    changes: dict[str, Any], message: str, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    folder = tiny_model_dir("gemma4", **GGUF_OVERRIDES)
    with pytest.raises(ModelLoadError, match=message):
        resolve_model(str(write_gguf(folder, "gemma4", tmp_path / "model.gguf", **changes))).config()
