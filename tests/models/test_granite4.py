"""Checkpoints of Granite 4: the fields of both file formats, and the models that are rejected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_gguf_parity import ARCHITECTURE_NAMES, OVERRIDES, assert_logits_of_transformers, load, write_gguf

from chairlift.errors import ModelLoadError
from chairlift.loading.resolve import resolve_model
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.registry import get_architecture, read_hf_config

TinyModelDir = Callable[..., Path]

GRANITE_4_MICRO: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.015625,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "init_method": "mup",
    "intermediate_size": 8192,
    "layer_types": ["attention"] * 40,
    "logits_scaling": 10,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 80,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm",
    "num_attention_heads": 40,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "num_local_experts": 0,
    "output_router_logits": False,
    "position_embedding_type": "rope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.01,
    "shared_intermediate_size": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
"""The fields of a published model with attention in all layers."""


def test_fields_of_the_published_model() -> None:
    config = read_hf_config(GRANITE_4_MICRO, source="config.json")
    assert (config.architecture, config.name, config.num_layers) == ("granite", "granitemoehybrid", 40)
    assert (config.embedding_multiplier, config.logits_multiplier) == (12, 0.1)
    layer = config.layers[3]
    assert (layer.attention.scale, layer.attention_norms.multiplier) == (0.015625, 0.22)
    assert layer.attention.rope == RopeConfig(theta=1e7)
    (up, rows), (down, _) = *layer.feed_forward.up.parts, *layer.feed_forward.down.parts
    assert rows == 16384
    for name, place in ((up, "input_linear"), (down, "output_linear")):
        places = get_architecture(config).hf_names(f"{name}.weight")
        assert f"model.layers.3.shared_mlp.{place}.weight" in [each.name for each in places]


@pytest.mark.parametrize("kind", ["nope", None])
def test_models_without_rotary_embedding(kind: str | None) -> None:
    config = read_hf_config({**GRANITE_4_MICRO, "position_embedding_type": kind}, source="config.json")
    assert config.ropes == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["attention"] * 39 + ["conv"]}, "layer_types contains 'conv', which is not supported; supp"),
        ({"layer_types": ["linear_attention"] * 40}, "layer_types has no layer with attention"),
        ({"layer_types": None}, "layers_block_type has no layer with attention"),
        ({"layer_types": ["attention"]}, "layer_types must hold the type of each of 40 layers"),
        ({"layer_types": None, "layers_block_type": ["mamba"] * 40}, "layers_block_type has no layer with attention"),
        ({"num_local_experts": 64}, "num_experts_per_tok must be an integer between 1 and 64, got 0"),
        ({"num_local_experts": None}, "num_local_experts is missing"),
        ({"normalization_function": "layernorm"}, "normalization_function is 'layernorm', which is not supported"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'.*supported: nope, rope"),
        ({"shared_intermediate_size": None}, "shared_intermediate_size is missing"),
        ({"rotary_dim": 32}, "rotary_dim is 32, and the granite architecture does not declare this property"),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_hf_config({**GRANITE_4_MICRO, **changes}, source="config.json")


@pytest.mark.parametrize("name", ["granite", "granitehybrid"])
def test_gguf_files_without_rotary_embedding(
    name: str, tiny_model_dir: TinyModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURE_NAMES, "granite4", name)
    folder = tiny_model_dir("granite4", **OVERRIDES["granite4"], position_embedding_type=None)
    path = write_gguf(folder, "granite4", tmp_path / "model.gguf", **{"rope.scaling.finetuned": False})
    assert_logits_of_transformers(load(path), folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count_kv": [0, 2]}, "head_count_kv differs between layers"),
        ({"expert_count": 8}, "granite.expert_count is 8, and the granite architecture does not declare"),
        ({"expert_shared_feed_forward_length": 64}, r"is 64, which is not supported: it must be feed_forward_length"),
    ],
)
def test_errors_of_gguf_files(
    changes: dict[str, Any], message: str, tiny_model_dir: TinyModelDir, tmp_path: Path
) -> None:
    path = write_gguf(tiny_model_dir("granite4", **OVERRIDES["granite4"]), "granite4", tmp_path / "a.gguf", **changes)
    with pytest.raises(ModelLoadError, match=message):
        resolve_model(str(path)).config()
