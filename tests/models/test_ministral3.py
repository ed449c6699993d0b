"""Checkpoints of Ministral 3: the fields of both file formats, and models with images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_gguf_parity import write_gguf

from chairlift.errors import ModelLoadError
from chairlift.loading.resolve import resolve_model
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.registry import read_hf_config

TinyModelDir = Callable[..., Path]

MINISTRAL_8B: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "dtype": "bfloat16",
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "model_type": "ministral3",
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "max_position_embeddings": 262144,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
    "vision_feature_layer": -1,
}
"""The fields of the published model of 8 billion parameters."""


def changed(**changes: Any) -> dict[str, Any]:
    """The published fields with other fields of the text model."""
    return {**MINISTRAL_8B, "text_config": {**MINISTRAL_8B["text_config"], **changes}}


def test_fields_of_the_published_model() -> None:
    config = read_hf_config(MINISTRAL_8B, source="config.json")
    assert (config.architecture, config.name, config.num_layers) == ("ministral3", "ministral3", 34)
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (1, (2,), "bfloat16")
    assert not config.tie_word_embeddings
    assert {layer.attention.sliding_window for layer in config.layers} == {None}
    assert {layer.attention.rope for layer in config.layers} == {
        RopeConfig(
            theta=1e6, scaling="yarn", factor=16.0, original_max_position_embeddings=16384, query_scaling_beta=0.1
        )
    }


def test_the_outer_fields_have_priority() -> None:
    outer = {"eos_token_id": [7, 8], "tie_word_embeddings": True}
    config = read_hf_config({**changed(tie_word_embeddings=False), **outer}, source="config.json")
    assert (config.eos_token_ids, config.tie_word_embeddings) == ((7, 8), True)


def test_a_text_model_of_mistral_does_not_scale_queries() -> None:
    config = read_hf_config(
        changed(model_type="mistral", rope_parameters={"rope_type": "default", "rope_theta": 1e9}), source="config.json"
    )
    assert (config.architecture, config.name) == ("llama", "mistral")
    assert {layer.attention.rope for layer in config.layers} == {RopeConfig(theta=1e9)}


def rope(**changes: Any) -> dict[str, Any]:
    return changed(rope_parameters={**MINISTRAL_8B["text_config"]["rope_parameters"], **changes})


def test_a_beta_of_zero_does_not_scale_queries() -> None:
    config = read_hf_config(rope(llama_4_scaling_beta=0), source="config.json")
    assert {layer.attention.rope.scales_queries for layer in config.layers if layer.attention.rope} == {False}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**MINISTRAL_8B, "text_config": None}, "text_config is missing"),
        (changed(model_type="mistral9"), r"text_config\.model_type is 'mistral9', which is not supported"),
        (changed(rope_parameters=None), r"text_config\.rope_parameters is missing"),
        (rope(llama_4_scaling_beta=None), r"rope_parameters\.llama_4_scaling_beta is missing"),
        (rope(llama_4_scaling_beta=-1), r"llama_4_scaling_beta must be a number above 0"),
        (rope(original_max_position_embeddings=0), r"original_max_position_embeddings must be an integer between 1"),
        (changed(n_routed_experts=8), r"text_config\.n_routed_experts is 8, and the ministral3 architecture"),
    ],
)
def test_errors_name_the_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_hf_config(config, source="config.json")


@pytest.mark.parametrize("beta", [None, 0.0])
def test_gguf_files_without_scaled_queries(beta: float | None, tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    folder = tiny_model_dir("ministral3", sliding_window=None)
    path = write_gguf(folder, "ministral3", tmp_path / "model.gguf", **{"attention.temperature_scale": beta})
    config = resolve_model(str(path)).config()
    assert {layer.attention.rope.scales_queries for layer in config.layers if layer.attention.rope} == {False}


def test_gguf_files_need_the_original_context(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    folder = tiny_model_dir("ministral3", sliding_window=None)
    absent = {"rope.scaling.type": "none", "rope.scaling.original_context_length": None, "rope.scaling.factor": None}
    path = write_gguf(
        folder, "ministral3", tmp_path / "model.gguf", **absent, **{"rope.scaling.yarn_log_multiplier": None}
    )
    with pytest.raises(ModelLoadError, match=r"mistral3\.rope\.scaling\.original_context_length is missing"):
        resolve_model(str(path)).config()
