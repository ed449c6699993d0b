"""Checkpoints of Apertus: the fields of both file formats, and where the parameters of xIELU are."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.errors import ModelLoadError
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.gguf_header import GGUFHeader
from chairlift.models.registry import ARCHITECTURES, read_hf_config

APERTUS_8B: dict[str, Any] = {
    "architectures": ["ApertusForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 68,
    "hidden_act": "xielu",
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "model_type": "apertus",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "post_norm": False,
    "qk_norm": True,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 12000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 131072,
}
"""The fields of the published model of 8 billion parameters."""
ROPE = RopeConfig(theta=12e6, scaling="llama3", factor=8.0, original_max_position_embeddings=8192)


def read(**changes: Any) -> ModelConfig:
    fields = {key: value for key, value in {**APERTUS_8B, **changes}.items() if value is not ...}
    return read_hf_config(fields, source="config.json")


def read_gguf(**xielu: Any) -> ModelConfig:
    sizes = {
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "block_count": 2,
        "vocab_size": 256,
        "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    metadata = {f"apertus.{key}": value for key, value in sizes.items()}
    metadata |= {f"xielu.{key}": value for key, value in xielu.items()}
    header = GGUFHeader(metadata, "model.gguf", "apertus", {"output.weight"}, {})
    return ARCHITECTURES["apertus"].gguf_readers["apertus"](header)


def parameters(config: ModelConfig) -> list[tuple[float | str, ...]]:
    return [layer.feed_forward.parameters for layer in config.layers if layer.feed_forward is not None]


def test_fields_of_the_published_model() -> None:
    config = read()
    assert (config.architecture, config.num_layers, config.dtype) == ("apertus", 32, "bfloat16")
    assert {layer.attention.rope for layer in config.layers if layer.attention is not None} == {ROPE}
    names = [f"model.layers.31.mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")]
    assert parameters(config)[31] == tuple(names)


def test_a_file_without_rotary_embedding_has_that_of_transformers() -> None:
    for theta in (..., 10000.0):
        config = read(rope_scaling=..., rope_theta=theta)
        assert {layer.attention.rope for layer in config.layers if layer.attention is not None} == {ROPE}


def test_gguf_files_have_one_number_or_one_for_each_layer() -> None:
    values = {"alpha_p": [0.1, 0.2], "alpha_n": [0.3, 0.4], "beta": 0.5, "eps": -1e-6}
    assert parameters(read_gguf(**values)) == [(0.1, 0.3, 0.5, -1e-6), (0.2, 0.4, 0.5, -1e-6)]
    for wrong in ([0.1], [0.1, "0.2"], None):
        with pytest.raises(ModelLoadError, match=r"xielu\.alpha_p must be a number or hold one for each of 2 "):
            read_gguf(**{**values, "alpha_p": wrong})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_act", "silu", "hidden_act is 'silu', which is not supported; supported: xielu"),
        ("qk_norm", False, "qk_norm is False, which is not supported: queries and keys have norms"),
        ("post_norm", True, "post_norm is True, which is not supported: norms precede the branches"),
        ("mlp_bias", True, "mlp_bias is True, which is not supported"),
    ],
)
def test_what_is_not_computed_is_an_error(field: str, value: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(**{field: value})
