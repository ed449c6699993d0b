"""Checkpoints of models whose attention has a gate: their fields, and values that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_gguf_parity import assert_logits_of_transformers, load, write_gguf
from test_published_configs import CONFIGS

from chairlift.errors import ModelLoadError
from chairlift.loading.lora_adapter import read_lora_adapter
from chairlift.loading.resolve import resolve_model
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.kv_layout import KVLayout
from chairlift.models.registry import read_hf_config
from chairlift.models.torch_operations import torch_operations
from support.lora_adapters import write_adapter


def muse(**changes: Any) -> ModelConfig:
    published = CONFIGS["Muse-Glimmer-30B"]
    return read_hf_config({**published, "text_config": {**published["text_config"], **changes}}, source="config.json")


def test_fields_of_muse_glimmer() -> None:
    config = muse()
    specs = [layer.attention for layer in config.layers]
    assert [spec.sliding_window for spec in specs] == [2048, 2048, 2048, None] * 13
    assert [spec.rope is None for spec in specs] == [False, False, False, True] * 13
    assert {spec.scale for spec in specs} == {3.87 * 128**-0.5}
    assert sum(matrix.num_weights for matrix in config.matrices) == 27_853_389_824
    assert torch_operations(config) == []
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (200_000, (200_001,), False)


def test_fields_that_a_file_of_muse_glimmer_lacks_have_the_defaults_of_transformers() -> None:
    published = CONFIGS["Muse-Glimmer-30B"]
    kept = ("model_type", "rope_parameters", "bos_token_id", "eos_token_id")
    text = {key: published["text_config"][key] for key in kept}
    assert read_hf_config({**published, "text_config": text}, source="config.json") == muse()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "gelu"}, r"text_config\.hidden_activation is 'gelu'"),
        ({"layer_rope_theta": [1e4] * 52}, r"layer_rope_theta must hold 0 or rope_theta \(500000\) for each of 52"),
        ({"layer_rope_theta": [0]}, r"layer_rope_theta must hold 0 or rope_theta"),
        ({"layer_types": ["conv"] * 52}, r"layer_types must hold 52 of sliding_attention, full_attention"),
        ({"qk_scale_factor": 0}, r"qk_scale_factor must be a number above 0"),
        ({"num_experts": 8}, r"num_experts is 8, and the muse_glimmer architecture does not declare"),
    ],
)
def test_values_that_muse_glimmer_does_not_compute_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        muse(**changes)


def test_an_adapter_of_all_linear_layers(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """The gate has a matrix. Those of the encoder are skipped, also where a module has no further name."""
    folder = tiny_model_dir("muse_glimmer")
    write_adapter(folder, tmp_path, target_modules="all-linear", r=2)
    matrices = read_lora_adapter(str(tmp_path), resolve_model(str(folder)).config(), 8)
    names = (*(f"self_attn.{part}_proj" for part in ("q", "k", "v", "o", "gate")), "mlp.gate_proj", "mlp.up_proj")
    assert set(matrices) == {f"model.layers.{layer}.{name}" for layer in range(5) for name in (*names, "mlp.down_proj")}


def read(name: str, **changes: Any) -> ModelConfig:
    return read_hf_config({**CONFIGS[name], **changes}, source="config.json")


def with_defaults(name: str, *kept: str) -> ModelConfig:
    """The model without the fields that have the defaults of transformers."""
    ends = ("architectures", "model_type", "bos_token_id", "eos_token_id", "dtype")
    return read_hf_config({key: CONFIGS[name][key] for key in (*ends, *kept)}, source="config.json")


def test_fields_of_laguna() -> None:
    config = read("Laguna-XS-2.1")
    specs = [layer.attention for layer in config.layers]
    assert [spec.num_heads for spec in specs] == [48, 64, 64, 64] * 10
    assert [spec.gate.out_features for spec in specs] == [48, 64, 64, 64] * 10
    assert [spec.sliding_window for spec in specs] == [None, 512, 512, 512] * 10
    assert [spec.rope.num_dims(spec.head_dim) for spec in specs] == [64, 128, 128, 128] * 10
    assert [layer.mixture is None for layer in config.layers] == [True] + [False] * 39
    assert sum(matrix.num_weights for matrix in config.matrices) == 33_442_430_976
    assert torch_operations(config) == []
    assert KVLayout.by_window(config, 262_144).windows == (None, 512, 512, 512)


def test_fields_that_a_file_of_laguna_lacks_have_the_defaults_of_transformers() -> None:
    """Published files have other values for the fields that are kept."""
    kept = (
        "layer_types", "max_position_embeddings", "moe_routed_scaling_factor", "num_attention_heads_per_layer",
        "rope_parameters",
    )  # fmt: skip
    assert with_defaults("Laguna-XS-2.1", *kept) == read("Laguna-XS-2.1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gating": False}, "gating must be true, 'per-head' or 'per-element', got False"),
        ({"gating": "per-element"}, "gating_types is .*: transformers ignores it"),
        ({"num_attention_heads_per_layer": [48]}, "num_attention_heads_per_layer must hold 40 numbers"),
        ({"num_attention_heads_per_layer": [12] * 40}, r"num_attention_heads \(12\) must be a multiple of .* \(8\)"),
        ({"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping is 30.0, which is not supported"),
        ({"mlp_only_layers": [0, 1]}, r"mlp_only_layers is \[0, 1\].*mlp_layer_types or its default has others"),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_parameters has no full_attention"),
        ({"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled is True"),
    ],
)
def test_values_that_laguna_does_not_compute_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read("Laguna-XS-2.1", **changes)


def test_the_gate_of_a_gguf_file_is_as_wide_as_its_tensor(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model_dir("laguna", gating="per-element")
    path = write_gguf(folder, "laguna", tmp_path / "model.gguf")
    assert_logits_of_transformers(load(path), folder)


def test_fields_of_lfm3() -> None:
    config = read("LFM3-1.7B")
    kinds = [layer.attention and layer.attention.sliding_window for layer in config.layers]
    assert [layer.attention is None for layer in config.layers] == [True, True, False, True, *[False, True] * 10]
    assert kinds[2:8] == [None, None, 256, None, None, None]
    assert with_defaults("LFM3-1.7B") == config
    assert torch_operations(config) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_L_cache": 17}, "conv_L_cache must be an integer between 2 and 16, got 17"),
        ({"layer_types": ["conv"] * 24}, "layer_types has no layer with attention in 24 layers"),
        ({"layer_types": ["mamba"] * 24}, "layer_types contains 'mamba', which is not supported"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters has no sliding_attention"),
    ],
)
def test_values_that_lfm3_does_not_compute_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read("LFM3-1.7B", **changes)
