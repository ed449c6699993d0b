"""Checkpoints of Qwen3.5: the fields of published files, parts without text, adapters, and errors of wrong files."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.products import layer_products
from safetensors.torch import load_file, save_file
from test_models_parity import assert_close, expected_logits, load, prompts, run, tolerance

from chairlift.config import EngineConfig
from chairlift.engine.startup.loaded_model import load_model
from chairlift.errors import ModelLoadError
from chairlift.loading.lora_adapter import PREFIX, read_lora_adapter
from chairlift.models.registry import get_architecture, read_gguf_config, read_hf_config
from support.packed_steps import Tables

TinyModelDir = Callable[..., Path]

TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 248320,
}
QWEN35_4B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": TEXT,
    "tie_word_embeddings": True,
    "video_token_id": 248057,
    "vision_config": {"depth": 24, "hidden_size": 1024},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}
MOE: dict[str, Any] = {
    **{key: value for key, value in TEXT.items() if key != "intermediate_size"},
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "shared_expert_intermediate_size": 512,
}
GGUF: dict[str, Any] = {
    "general.architecture": "qwen35",
    **{
        f"qwen35.{key}": value
        for key, value in {
            "attention.head_count": 16,
            "attention.head_count_kv": 4,
            "attention.key_length": 256,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.value_length": 256,
            "block_count": 32,
            "context_length": 262144,
            "embedding_length": 2560,
            "feed_forward_length": 9216,
            "full_attention_interval": 4,
            "rope.dimension_count": 64,
            "rope.dimension_sections": [11, 11, 10, 0],
            "rope.freq_base": 1e7,
            "ssm.conv_kernel": 4,
            "ssm.group_count": 16,
            "ssm.inner_size": 4096,
            "ssm.state_size": 128,
            "ssm.time_step_rank": 32,
            "vocab_size": 248320,
        }.items()
    },
}


def read_text(**changes: Any) -> Any:
    """The declaration of the text model, without its predictor."""
    text = {"mtp_num_hidden_layers": 0, **changes}
    return read_hf_config({**QWEN35_4B, "text_config": {**TEXT, **text}}, source="config.json")


def test_a_state_has_a_matrix_of_each_head_and_the_inputs_of_the_convolution() -> None:
    config = read_text()
    assert sorted(config.attention_specs) == list(range(3, 32, 4))
    assert config.state_values_per_sequence == 24 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))
    assert 4 * config.state_values_per_sequence == pytest.approx(49 * 2**20, rel=0.05)
    attention = config.attention_specs[3]
    assert attention.gate is not None
    assert attention.gate.out_features == attention.query_size == 16 * 256
    assert attention.rope is not None
    assert (attention.rope.rotary_dim, attention.rope.theta) == (64, 1e7)
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (248044,))


def test_a_shared_expert_is_a_gated_network_beside_the_mixture() -> None:
    config = read_hf_config(MOE, source="config.json")
    layer = config.layers[0]
    assert layer.feed_forward is not None
    assert layer.feed_forward.inner_size == 512
    assert layer.parallel_experts is not None
    assert layer.parallel_experts.gate is not None
    assert layer.parallel_experts.gate.parts == (("model.layers.0.mlp.shared_expert_gate", 1),)
    assert layer.mixture is not None
    assert layer.mixture.router is not None
    assert layer.mixture.router.num_experts == 256


def test_both_formats_declare_the_same_sizes() -> None:
    config, found = read_text(), read_gguf_config(GGUF, source="model.gguf")
    assert found.state_values_per_sequence == config.state_values_per_sequence
    assert found.kv_values_per_token == config.kv_values_per_token
    assert found.layers[0].matrices == config.layers[0].matrices
    assert found.layers[3].matrices == config.layers[3].matrices
    delta = found.layers[0].recurrence
    assert delta is not None
    assert delta.gated_delta is not None
    assert delta.gated_delta.has_tiled_keys


def test_newer_files_list_the_recurrent_layers_and_end_with_layers_that_predict_further_tokens() -> None:
    listed = [index % 3 > 0 for index in range(32)]
    changes = {"block_count": 33, "nextn_predict_layers": 1, "attention.recurrent_layers": [*listed, False]}
    changed = {**GGUF, **{f"qwen35.{key}": value for key, value in changes.items()}}
    config = read_gguf_config(changed, source="x.gguf")
    assert [layer.recurrence is not None for layer in config.layers] == listed
    assert config.predictor is not None
    names = {name for matrix in config.predictor.layer.matrices for name in matrix.weight_names}
    places = {get_architecture(config).gguf_name(name) for name in names}
    assert {place.name.split(".")[1] for place in places if place is not None} == {"32"}
    own = read_gguf_config(changed, source="x.gguf", tensor_names=["blk.32.nextn.embed_tokens.weight"])
    assert own.predictor is None, "a table of its own is not supported"


def test_the_predictor_is_a_layer_with_attention_whose_k_and_v_are_counted() -> None:
    plain, config = read_text(), read_text(mtp_num_hidden_layers=1)
    predictor = config.predictor
    assert predictor is not None
    assert predictor.projection.parts == (("mtp.fc", 2560),)
    assert predictor.projection.in_features == 2 * 2560
    assert layer_products(predictor.layer) == tuple(
        replace(product, matrix=replace(product.matrix, parts=renamed(product.matrix.parts)))
        for product in layer_products(plain.layers[3])
    )
    assert config.kv_values_per_token == plain.kv_values_per_token * 9 // 8
    assert sum(m.num_weights for m in config.matrices) == sum(m.num_weights for m in plain.matrices) + sum(
        matrix.num_weights for matrix in (predictor.projection, *plain.layers[3].matrices)
    )
    assert read_text(mtp_num_hidden_layers=2).predictor is None
    assert read_text(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=True).predictor is None


def renamed(parts: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    return tuple((name.replace("model.layers.3.", "mtp.layers.0."), size) for name, size in parts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 31}, "layer_types must hold the type of each of 32 layers"),
        ({"layer_types": ["sliding_attention"] * 32}, "contains 'sliding_attention', .* supported: linear_attention, "),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types has no layer with attention"),
        ({"layer_types": None, "full_attention_interval": 40}, r"full_attention_interval \(40\) leaves no layer with"),
        ({"linear_num_value_heads": 24}, r"linear_num_value_heads \(24\) must be a multiple of .* \(16\)"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim must be an integer between 1"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be an integer between 2 and 16, got 1"),
        ({"attn_output_gate": False}, "attn_output_gate is False, which is not supported"),
        ({"partial_rotary_factor": 0.001, "rope_parameters": None}, r"\(0.001\) must rotate an even number of the 256"),
        ({"num_experts": 8}, "num_experts is 8, and the qwen3.5 architecture does not declare this property"),
    ],
)  # fmt: skip
def test_errors_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_text(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.time_step_rank": 8}, r"ssm.time_step_rank \(8\) must be a multiple of .*ssm.group_count \(16\)"),
        ({"ssm.inner_size": 4100}, r"ssm.inner_size \(4100\) must be a multiple of .*ssm.time_step_rank \(32\)"),
        ({"full_attention_interval": 40}, r"full_attention_interval \(40\) leaves no layer with attention"),
        ({"attention.recurrent_layers": [True] * 31}, "recurrent_layers must hold the type of each of 32 layers"),
        ({"attention.recurrent_layers": [True] * 32}, "recurrent_layers has no layer with attention"),
        ({"attention.recurrent_layers": [1, False] * 16}, "recurrent_layers contains 1, .* supported: True, False"),
        ({"nextn_predict_layers": 32}, "nextn_predict_layers must be an integer between 0 and 31"),
        ({"ssm.conv_kernel": None}, "ssm.conv_kernel is missing"),
    ],
)  # fmt: skip
def test_errors_name_the_key_of_a_gguf_file(changes: dict[str, Any], message: str) -> None:
    changed = {**GGUF, **{f"qwen35.{key}": value for key, value in changes.items()}}
    with pytest.raises(ModelLoadError, match=message):
        read_gguf_config(changed, source="model.gguf")


def as_published(source: Path, folder: Path) -> Path:
    """The folder of a text model as that of a model with images and multi-token prediction."""
    shutil.copytree(source, folder)
    text = json.loads((folder / "config.json").read_text())
    dtype, moe = text.pop("dtype"), "num_experts" in text
    text.pop("architectures")
    config = {
        **QWEN35_4B,
        "architectures": [f"Qwen3_5{'Moe' if moe else ''}ForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": {**text, "dtype": dtype},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    if moe:
        stack_experts(renamed)
    renamed |= {"model.visual.patch_embed.proj.weight": torch.ones(3), "mtp.fc.weight": torch.ones(2, 2)}
    save_file(renamed, folder / "model.safetensors")
    return folder


def stack_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Put the experts of each layer into one tensor, with gate and up one after the other."""
    for layer in range(4):
        prefix = f"model.language_model.layers.{layer}.mlp.experts"
        parts = {
            name: torch.stack([tensors.pop(f"{prefix}.{i}.{name}_proj.weight") for i in range(5)])
            for name in ("gate", "up", "down")
        }
        tensors[f"{prefix}.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), dim=1)
        tensors[f"{prefix}.down_proj"] = parts["down"]


@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_5_moe"])
def test_parts_without_text_are_skipped_and_named(
    arch: str, tiny_model_dir: TinyModelDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tiny_model_dir(arch)
    folder = as_published(source, tmp_path / "published")
    with torch.inference_mode():
        model, expected = load(folder, "torch"), expected_logits(source)
        model.allocate_kv_cache(num_blocks=64, block_size=8)
        found = run(model, Tables(64, 8), [(sequence, 0, len(prompt)) for sequence, prompt in prompts().items()])
        for sequence, logits in expected.items():
            assert_close(found[sequence], logits, tolerance(source))
    with caplog.at_level(logging.INFO, logger="chairlift"):
        load_model(EngineConfig(model=str(folder), skip_tokenizer_init=True, num_threads=1, kernels="torch"))
    assert any("skipped 1 tensors model.visual.*" in message for message in caplog.messages)
    assert any("skipped 1 tensors mtp.*" in message for message in caplog.messages)


def test_an_adapter_of_the_query_projection_covers_the_gate(tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    folder = tiny_model_dir("qwen3_5")
    config = read_hf_config(json.loads((folder / "config.json").read_text()), source="config.json")
    module = "model.layers.1.self_attn.q_proj"
    a, b = torch.randn(3, 64), torch.randn(2 * 4 * 24, 3)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 3}))
    tensors = {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    found = read_lora_adapter(str(tmp_path), config, 8)
    assert sorted(found) == ["model.layers.1.self_attn.q_gate", module]
    heads = b.view(4, 2, 24, 3)
    for name, half in ((module, 0), ("model.layers.1.self_attn.q_gate", 1)):
        assert torch.equal(found[name][0], a)
        assert torch.equal(found[name][1], heads[:, half].reshape(-1, 3).t())
