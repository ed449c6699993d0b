"""Checkpoints of models with Mamba-2 layers: the fields of their files, and the models that are rejected."""

from __future__ import annotations

from typing import Any

import pytest
from test_granite4 import GRANITE_4_MICRO
from test_published_configs import read

from chairlift.errors import ModelLoadError
from chairlift.models.registry import read_gguf_config, read_hf_config
from chairlift.models.torch_operations import torch_operations

GRANITE_4_H: dict[str, Any] = {
    **GRANITE_4_MICRO,
    "hidden_size": 2048,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "mamba_d_state": 128,
    "mamba_n_heads": 64,
    "num_attention_heads": 32,
    "position_embedding_type": "nope",
}
FALCON_H1: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 64,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 16384,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "vocab_size": 32784,
}
NEMOTRON_H: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 3072,
    "hybrid_override_pattern": "M-M-*-M-",
    "intermediate_size": 12288,
    "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 64,
    "mamba_num_heads": 112,
    "max_position_embeddings": 8192,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
    "time_step_limit": [0.0, float("inf")],
    "vocab_size": 131072,
}
NEMOTRON_H_MOE: dict[str, Any] = {
    **NEMOTRON_H,
    "hybrid_override_pattern": "MEM*ME-E",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 8,
    "num_experts_per_tok": 6,
}
"""The fields of published models that the reader needs."""


def test_most_layers_of_granite_4_h_keep_a_state_instead_of_keys_and_values() -> None:
    config = read_hf_config(GRANITE_4_H, source="config.json")
    assert sorted(config.attention_specs) == [5, 15, 25, 35]
    layer = config.layers[0]
    assert layer.recurrence is not None
    assert layer.recurrence.input.parts == (("model.layers.0.mamba.in_proj", 2 * 4096 + 2 * 128 + 64),)
    assert layer.recurrence_norms.multiplier == 0.22
    assert config.state_values_per_sequence == 36 * (3 * (4096 + 2 * 128) + 64 * 128 * 64)
    assert config.ropes == ()


def test_multipliers_of_falcon_h1_are_factors_of_norms_scores_rows_and_branches() -> None:
    config = read_hf_config(FALCON_H1, source="config.json")
    layer = config.layers[35]
    assert layer.attention is not None
    assert layer.attention.scale == 64**-0.5 * 0.390625
    assert layer.attention_norms.multiplier == 0.9375
    assert layer.recurrence is not None
    assert layer.recurrence.mamba2 is not None
    assert layer.recurrence.mamba2.projection_scales == tuple(FALCON_H1["ssm_multipliers"])
    assert layer.recurrence.norm is None
    assert layer.recurrence_norms.before is not None
    assert layer.recurrence_norms.before.weight_multiplier == 1.25
    assert layer.feed_forward is not None
    assert layer.feed_forward.parameters == (0.8838834764831844,)
    assert layer.feed_forward_norms.multiplier == 0.5859375


def test_a_layer_of_nemotron_h_has_one_branch() -> None:
    config = read_hf_config(NEMOTRON_H, source="config.json")
    kinds = [(bool(each.recurrence), bool(each.attention), bool(each.feed_forward)) for each in config.layers]
    mamba, attention, network = (True, False, False), (False, True, False), (False, False, True)
    assert kinds == [mamba, network, mamba, network, attention, network, mamba, network]
    assert torch_operations(config) == []


def test_published_sizes_of_nemotron_3_super() -> None:
    config = read("NVIDIA-Nemotron-3-Super-120B-A12B-BF16")
    assert sum(matrix.num_weights for matrix in config.matrices) == 120_665_931_776
    assert torch_operations(config) == []


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (GRANITE_4_H, {"mamba_n_heads": 60}, r"mamba_n_heads \(60\) must divide the inner size .* \(4096\)"),
        (GRANITE_4_H, {"mamba_d_head": 32}, r"mamba_d_head \(32\) times mamba_n_heads \(64\) must be 4096"),
        (GRANITE_4_H, {"mamba_n_groups": 3}, r"mamba_n_groups \(3\) must divide mamba_n_heads \(64\)"),
        (GRANITE_4_H, {"mamba_d_conv": 1}, "mamba_d_conv must be an integer between 2 and 16, got 1"),
        (GRANITE_4_H, {"mamba_d_state": None}, "mamba_d_state is missing"),
        (GRANITE_4_H, {"time_step_limit": [0.1]}, "time_step_limit must be a list of two numbers"),
        (GRANITE_4_H, {"time_step_limit": [1.0, 0.5]}, "time_step_limit must be a list of two numbers"),
        (FALCON_H1, {"mlp_multipliers": [1.0]}, r"mlp_multipliers must be a list of 2 numbers, got \[1.0\]"),
        (FALCON_H1, {"ssm_multipliers": "x"}, "ssm_multipliers must be a list of 5 numbers, got 'x'"),
        (FALCON_H1, {"mamba_use_mlp": False}, "mamba_use_mlp is False, which is not supported"),
        (NEMOTRON_H, {"hybrid_override_pattern": "ME*-M-M-"}, "moe_shared_expert_intermediate_size is missing"),
        (NEMOTRON_H, {"hybrid_override_pattern": "M-Mx*-M-"}, "contains 'x', which is not supported; supported: M, "),
        (NEMOTRON_H, {"hybrid_override_pattern": "M-M-M-M-"}, "has no layer with attention"),
        (NEMOTRON_H, {"num_hidden_layers": 9}, "num_hidden_layers is 9, .*hybrid_override_pattern has 8 layers"),
        (NEMOTRON_H, {"hybrid_override_pattern": None}, "layer_types must hold the type of each layer, got None"),
        (NEMOTRON_H, {"mlp_hidden_act": "gelu"}, "mlp_hidden_act is 'gelu', which is not supported"),
        (NEMOTRON_H_MOE, {"n_group": 2}, "n_group is 2, which is not supported: experts in groups"),
        (NEMOTRON_H_MOE, {"moe_latent_size": 0}, "moe_latent_size must be an integer between 1 and"),
        (NEMOTRON_H_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok must be an integer between 1 and 8, got 9"),
    ],
)  # fmt: skip
def test_errors_name_the_field(model: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_hf_config({**model, **changes}, source="config.json")


NEMOTRON_H_GGUF: dict[str, Any] = {
    "general.architecture": "nemotron_h",
    **{
        f"nemotron_h.{key}": value
        for key, value in {
            "attention.head_count": 32,
            "attention.head_count_kv": [0, 0, 8, 0],
            "attention.key_length": 128,
            "attention.layer_norm_epsilon": 1e-5,
            "attention.value_length": 128,
            "block_count": 4,
            "context_length": 8192,
            "embedding_length": 3072,
            "feed_forward_length": [0, 12288, 0, 12288],
            "ssm.conv_kernel": 4,
            "ssm.group_count": 8,
            "ssm.inner_size": 7168,
            "ssm.state_size": 128,
            "ssm.time_step_rank": 112,
            "vocab_size": 131072,
        }.items()
    },
}


@pytest.mark.parametrize("heads", [32, [0, 0, 32, 0]])
def test_layers_of_a_gguf_file_are_those_of_the_same_folder(heads: int | list[int]) -> None:
    found = read_gguf_config(
        {**NEMOTRON_H_GGUF, "nemotron_h.attention.head_count": heads},
        source="x.gguf",
        tensor_names=["blk.0.ssm_conv1d.bias", "blk.0.ssm_norm.weight"],
    )
    expected = read_hf_config(
        {**NEMOTRON_H, "hybrid_override_pattern": "M-*-", "num_hidden_layers": 4}, source="config.json"
    )
    assert found.layers == expected.layers
    assert found.name == "nemotron_h"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count_kv": 8}, "head_count_kv must hold a number for each of 4 layers, got 8"),
        ({"feed_forward_length": [0, 9]}, r"feed_forward_length must hold a number for each of 4 layers, got \[0, 9\]"),
        ({"nextn_predict_layers": 4}, "nextn_predict_layers must be an integer between 0 and 3, got 4"),
        ({"ssm.time_step_rank": 111}, r"ssm.group_count \(8\) must divide ssm.time_step_rank \(111\)"),
        ({"attention.layer_norm_epsilon": None}, "layer_norm_rms_epsilon is missing"),
    ],
)
def test_errors_name_the_key_of_a_gguf_file(changes: dict[str, Any], message: str) -> None:
    changed = {**NEMOTRON_H_GGUF, **{f"nemotron_h.{key}": value for key, value in changes.items()}}
    with pytest.raises(ModelLoadError, match=message):
        read_gguf_config(changed, source="x.gguf")
