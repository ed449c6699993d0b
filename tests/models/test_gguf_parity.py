"""Logits of GGUF files equal those of transformers, with files that are converted as by llama.cpp."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_models_parity import assert_close, expected_logits, prompts, run, tolerance

from chairlift.loading.resolve import resolve_model
from chairlift.models.decoder import DecoderModel, build_model
from support.ggml_blocks import random_blocks
from support.gguf_files import NAMES, add_value, finish
from support.native import needs_native
from support.packed_steps import Tables
from support.tiny_models import MINISTRAL3_ROPE

BRANCH_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
PER_LAYER_INPUTS = {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
PARALLEL_EXPERTS = {
    "router.proj": "ffn_gate_inp",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
WHOLE_NAMES = {
    "layer_scalar": "layer_output_scale.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    **{
        f"{mixer}.{name}": other
        for mixer in ("mamba", "mixer")
        for name, other in (("A_log", "ssm_a"), ("D", "ssm_d"), ("dt_bias", "ssm_dt.bias"))
    },
    "self_attn.A_log": "ssm_a",
    "self_attn.dt_bias": "ssm_dt.bias",
    **{f"{mixer}.gate.e_score_correction_bias": "exp_probs_b.bias" for mixer in ("mixer", "block_sparse_moe")},
    **{f"mlp.{router}.e_score_correction_bias": "exp_probs_b.bias" for router in ("gate", "moe_statics", "experts")},
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.expert_bias": "exp_probs_b.bias",
    "pre_ff_layernorm.weight": "ffn_norm",
}
"""The parameters whose names do not end in "weight" or "bias"."""
EXPERTS = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.router.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{
        f"{network}.{name}_proj": f"ffn_{name}_shexp"
        for network in ("mlp.shared_expert", "mlp.shared_experts", "mlp.shared_mlp", "shared_mlp")
        for name in ("gate", "up", "down")
    },
    "shared_mlp.input_linear": "ffn_up_shexp",  # Gate and up of Granite-MoE-SWA.
    "shared_mlp.output_linear": "ffn_down_shexp",
    "self_attn.sinks": "attn_sinks",
    **{f"{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
LFM2 = {
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    **{f"conv.{name}": f"shortconv.{name}" for name in ("conv", "in_proj", "out_proj")},
}
QWEN35 = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
MAMBA = {
    **{
        f"{mixer}.{name}": f"ssm_{other}"
        for mixer in ("mamba", "mixer")
        for name, other in (("in_proj", "in"), ("conv1d", "conv1d"), ("norm", "norm"), ("out_proj", "out"))
    },
    "model.final_layernorm": "output_norm",
    "model.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "norm": "attn_norm",
    "mixer.gate": "ffn_gate_inp",
    **{f"mixer.{name}_proj": f"ffn_{name}" for name in ("up", "down")},
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    **{f"mixer.{name}_proj": f"attn_{name}" for name in ("q", "k", "v")},
    "mixer.o_proj": "attn_output",
    **{f"mixer.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("up", "down")},
    **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
LATENT = {
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in ("q_a", "q_b")},
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in ("k_b", "v_b", "kv_b")},
}
KIMI_LINEAR = {
    **{f"self_attn.{name}_proj": f"ssm_{name}" for name in ("f_a", "f_b", "g_a", "g_b")},
    **{f"self_attn.{name}_conv1d": f"ssm_conv1d_{name}" for name in "qkv"},
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
    **{f"block_sparse_moe.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    **{f"block_sparse_moe.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
DENSE_LATENT_FIELDS: dict[str, Any] = {
    "block_count": 3,
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 20,
    "rope.dimension_count": 8,
}
LATENT_FIELDS: dict[str, Any] = {
    **DENSE_LATENT_FIELDS,
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 40,
    "expert_shared_count": 2,
    "expert_weights_scale": 1.7,
}
ROUTED_FIELDS: dict[str, Any] = {
    "attention.key_length": 24,
    "attention.value_length": 24,
    "rope.dimension_count": 24,
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 40,
    "expert_gating_func": 2,
    "expert_weights_norm": True,
}
MAMBA_FIELDS: dict[str, Any] = {
    "attention.scale": 0.3,
    "embedding_scale": 3.0,
    "residual_scale": 0.4,
    "logit_scale": 2.5,
    "rope.scaling.finetuned": False,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 12,
    "ssm.time_step_rank": 8,
}
NEMOTRON_FIELDS: dict[str, Any] = {
    "block_count": 4,
    "attention.head_count_kv": [0, 0, 2, 0],
    "feed_forward_length": [0, 96, 0, 0],
    "attention.key_length": 24,
    "attention.value_length": 24,
    "rope.scaling.finetuned": False,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 120,
    "ssm.state_size": 12,
    "ssm.time_step_rank": 6,
    "ssm.group_count": 2,
}
NEMOTRON_MOE_FIELDS: dict[str, Any] = {
    **NEMOTRON_FIELDS,
    "feed_forward_length": [0, 40, 0, 40],
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_feed_forward_length": 40,
    "expert_shared_feed_forward_length": 56,
    "expert_shared_count": 1,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
    "expert_group_count": 1,
}
GRANITE_SWA_FIELDS: dict[str, Any] = {
    "block_count": 5,
    "attention.scale": 0.3,
    "embedding_scale": 3.0,
    "residual_scale": 0.4,
    "logit_scale": 2.5,
    "attention.sliding_window": 20,
    "attention.sliding_window_pattern": [False, True, True, True, False],
    "attention.rope_pattern": [1, 1, 0, 0, 1],
}
LAYER_NORM: dict[str, Any] = {
    "attention.layer_norm_rms_epsilon": None,
    "attention.layer_norm_epsilon": 1e-5,
    "logit_scale": 0.0625,
}
FUSED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
AFMOE = {
    "self_attn.gate_proj": "attn_gate",
    "post_attention_layernorm": "post_attention_norm",
    "pre_mlp_layernorm": "ffn_norm",
}
LAYER_NORMS = {
    "self_attn.g_proj": "attn_gate",
    "self_attn.gate_proj": "attn_gate",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "attention_layernorm": "attn_norm",
    "feedforward_layernorm": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
}
GGUF_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"attention.sliding_window": 24},
    "exaone": {},
    "qwen2": {},
    "qwen3": {},
    "qwen2vl": {"rope.dimension_sections": [4, 2, 2, 0]},
    "qwen3vl": {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3},
    "granite": {"attention.scale": 0.3, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 2.5},
    "granite4": {
        "attention.head_count_kv": [2, 2],
        "attention.scale": 0.3,
        "embedding_scale": 3.0,
        "residual_scale": 0.4,
        "logit_scale": 2.5,
        "expert_shared_feed_forward_length": 96,
        "rope.scaling.finetuned": True,
        "ssm.conv_kernel": 4,
    },
    "smollm3": {"block_count": 4},
    "ministral3": {
        "attention.key_length": 24,
        "attention.value_length": 24,
        "attention.temperature_scale": 0.7,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_log_multiplier": 1.5,
    },
    "arcee": {},
    "apertus": {},
    "seed_oss": {"attention.key_length": 24, "attention.value_length": 24},
    "starcoder2": {"attention.layer_norm_epsilon": 1e-3},
    "cohere": {**LAYER_NORM, "rope.scaling.type": "none", "rope.freq_base": 5e5},
    "cohere2": {
        **LAYER_NORM,
        "block_count": 4,
        "attention.sliding_window": 20,
        "rope.dimension_count": 16,
        "rope.scaling.type": "none",
    },
    "cohere2_moe": {
        **LAYER_NORM,
        "block_count": 5,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "attention.sliding_window": 20,
        "attention.sliding_window_pattern": [False, True, True, True, False],
        "rope.dimension_count": 24,
        "rope.scaling.type": "none",
        "leading_dense_block_count": 1,
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_feed_forward_length": 40,
        "expert_shared_count": 2,
        "expert_shared_feed_forward_length": 80,
        "expert_weights_norm": False,
        "expert_gating_func": 2,
    },
    "glm4": {
        "attention.layer_norm_rms_epsilon": 1.5625e-7,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "rope.dimension_count": 12,
    },
    "glm4_moe": {
        "block_count": 4,
        "nextn_predict_layers": 1,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "rope.dimension_count": 12,
        "leading_dense_block_count": 1,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 40,
        "expert_shared_count": 2,
        "expert_weights_scale": 1.7,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
    },
    "solar_open": {
        "attention.key_length": 24,
        "attention.value_length": 24,
        "rope.dimension_count": 24,
        "rope.freq_base": 1e6,
        "feed_forward_length": None,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 40,
        "expert_shared_count": 2,
        "expert_weights_scale": 1.7,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    },
    "dots1": {
        "block_count": 3,
        "leading_dense_block_count": 1,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 40,
        "expert_shared_count": 2,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_weights_scale": 1.7,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    },
    "hy_v3": {
        **ROUTED_FIELDS,
        "block_count": 4,
        "nextn_predict_layers": 1,
        "rope.freq_base": 11158840.0,
        "expert_shared_feed_forward_length": 80,
        "expert_weights_scale": 1.7,
    },
    "afmoe": {
        **ROUTED_FIELDS,
        "block_count": 5,
        "attention.sliding_window": 20,
        "expert_shared_count": 2,
        "expert_weights_scale": 1.7,
    },
    "exaone_moe": {
        **ROUTED_FIELDS,
        "block_count": 6,
        "nextn_predict_layers": 1,
        "attention.sliding_window": 24,
        "attention.sliding_window_pattern": [True, True, True, False, True],
        "expert_shared_count": 2,
        "expert_shared_feed_forward_length": 80,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_weights_scale": 2.5,
        "rope.scaling.type": "none",
    },
    "minimax_m2": {
        "attention.key_length": 24,
        "attention.value_length": 24,
        "rope.dimension_count": 16,
        "rope.freq_base": 5e6,
        "feed_forward_length": 40,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 40,
        "expert_gating_func": 2,
    },
    "hunyuan": {
        "attention.key_length": 24,
        "attention.value_length": 24,
        "rope.freq_base": 10000.0 * 5.0 ** (24 / 22),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
    },
    "hunyuan_moe": {
        "feed_forward_length": 40,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_feed_forward_length": 40,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": 40,
        "rope.freq_base": 10000.0 * 5.0 ** (24 / 22),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
    },
    "olmo2": {},
    "olmo3": {
        "block_count": 4,
        "attention.sliding_window": 20,
        "attention.sliding_window_pattern": [True, True, True, False],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    },
    "ernie4_5": {"attention.key_length": 24, "attention.value_length": 24},
    "ernie4_5_moe": {
        "block_count": 4,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "interleave_moe_layer_step": 2,
        "leading_dense_block_count": 1,
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_feed_forward_length": 40,
        "expert_shared_count": 2,
        "expert_shared_feed_forward_length": 48,
    },
    "exaone4": {
        "block_count": 4,
        "attention.sliding_window": 20,
        "attention.sliding_window_pattern": [True, True, True, False],
    },
    "phi3": {"rope.dimension_count": 8, "rope.scaling.original_context_length": 256, "attention.sliding_window": 0},
    "mixtral": {"attention.sliding_window": 24, "expert_count": 5, "expert_used_count": 2},
    "qwen2_moe": {
        "block_count": 4,
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_feed_forward_length": 40,
        "expert_shared_feed_forward_length": 48,
    },
    "qwen3_moe": {
        "block_count": 3,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_feed_forward_length": 40,
    },
    "qwen3vlmoe": {
        "block_count": 3,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_feed_forward_length": 40,
        "rope.dimension_sections": [4, 2, 2, 0],
        "n_deepstack_layers": 3,
    },
    "mellum": {
        "block_count": 4,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "attention.sliding_window": 20,
        "attention.sliding_window_pattern": [False, True, True, False],
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_feed_forward_length": 40,
        "rope.freq_base_swa": 300.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    },
    "olmoe": {"feed_forward_length": 40, "expert_count": 6, "expert_used_count": 3},
    "granitemoe": {
        "feed_forward_length": 40,
        "expert_count": 5,
        "expert_used_count": 2,
        "attention.scale": 0.3,
        "embedding_scale": 3.0,
        "residual_scale": 0.4,
        "logit_scale": 2.5,
    },
    "granitemoeshared": {
        "feed_forward_length": 40,
        "expert_shared_feed_forward_length": 56,
        "expert_count": 5,
        "expert_used_count": 2,
        "attention.scale": 0.3,
        "embedding_scale": 3.0,
        "residual_scale": 0.4,
        "logit_scale": 2.5,
    },
    "granite_swa": GRANITE_SWA_FIELDS,
    "granitemoe_swa": {
        **GRANITE_SWA_FIELDS,
        "feed_forward_length": 40,
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_shared_feed_forward_length": 48,
    },
    "gpt_oss": {
        "feed_forward_length": 40,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "attention.sliding_window": 20,
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_feed_forward_length": 40,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    },
    "gemma": {"attention.key_length": 24, "attention.value_length": 24},
    "gemma2": {
        "block_count": 4,
        "attention.sliding_window": 20,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 7.0,
    },
    "gemma3": {
        "block_count": 4,
        "attention.sliding_window": 20,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.sliding_window_pattern": [True, True, False, True],
        "final_logit_softcapping": 7.0,
        "rope.freq_base": 50000.0,
        "rope.freq_base_swa": 300.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 4.0,
    },
    "gemma4_unified": {
        "block_count": 4,
        "attention.sliding_window": 20,
        "attention.sliding_window_pattern": [True, False] * 2,
        "attention.head_count_kv": [2, 1] * 2,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "attention.key_length_swa": 16,
        "attention.value_length_swa": 16,
        "final_logit_softcapping": 7.0,
        "rope.freq_base": 50000.0,
        "rope.freq_base_swa": 300.0,
    },
    "gemma4_moe": {
        "attention.sliding_window": 20,
        "attention.sliding_window_pattern": [True, False],
        "attention.key_length": 24,
        "attention.value_length": 24,
        "attention.key_length_swa": 16,
        "attention.value_length_swa": 16,
        "final_logit_softcapping": 7.0,
        "rope.freq_base": 50000.0,
        "rope.freq_base_swa": 300.0,
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_feed_forward_length": 40,
    },
    "deepseek_v2": {
        **LATENT_FIELDS,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_log_multiplier": 0.07,
    },
    "deepseek_v3": {
        **LATENT_FIELDS,
        "attention.q_lora_rank": 24,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
    },
    "glm4_moe_lite": {
        **LATENT_FIELDS,
        "block_count": 4,
        "nextn_predict_layers": 1,
        "attention.q_lora_rank": 24,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
    },
    "mistral4": {
        **LATENT_FIELDS,
        "attention.q_lora_rank": 24,
        "expert_weights_norm": True,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_log_multiplier": 0.15,
    },
    "youtu": {
        **DENSE_LATENT_FIELDS,
        "attention.q_lora_rank": 24,
        "leading_dense_block_count": 3,
        "expert_feed_forward_length": 96,
        "expert_shared_count": 0,
    },
    "minicpm3": {
        "block_count": 3,
        "attention.head_count_kv": 4,
        "attention.q_lora_rank": 24,
        "attention.kv_lora_rank": 32,
        "attention.key_length": 24,
        "rope.dimension_count": 8,
        "rope.freq_base": None,
    },
    "kimi_linear": {
        **LATENT_FIELDS,
        "block_count": 4,
        "attention.head_count_kv": [0, 1] * 2,
        "attention.value_length": 14,
        "expert_gating_func": 2,
        "expert_group_used_count": 1,
        "kda.head_dim": 12,
        "ssm.conv_kernel": 4,
    },
    "lfm2": {"block_count": 4, "attention.head_count_kv": [0, 2] * 2, "shortconv.l_cache": 3},
    "lfm2_moe": {
        "block_count": 4,
        "attention.head_count_kv": [0, 2] * 2,
        "shortconv.l_cache": 3,
        "leading_dense_block_count": 1,
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_feed_forward_length": 40,
        "expert_gating_func": 2,
        "expert_weights_scale": 1.5,
    },
    "qwen3_5": {
        "block_count": 5,
        "nextn_predict_layers": 1,
        "attention.recurrent_layers": [True, False, True, False, False],
        "attention.key_length": 24,
        "attention.value_length": 24,
        "rope.dimension_count": 12,
        "rope.dimension_sections": [2, 2, 2, 0],
        "ssm.conv_kernel": 4,
        "ssm.state_size": 8,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 48,
    },
    "qwen3_5_moe": {
        "block_count": 4,
        "feed_forward_length": None,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "rope.dimension_count": 6,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 8,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 48,
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_feed_forward_length": 40,
        "expert_shared_feed_forward_length": 48,
    },
    "qwen3_next": {
        "block_count": 4,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "rope.dimension_count": 6,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 8,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 48,
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_feed_forward_length": 40,
        "expert_shared_feed_forward_length": 48,
    },
    "granite4_h": {**MAMBA_FIELDS, "block_count": 3, "attention.head_count_kv": [0, 2, 0], "ssm.group_count": 2},
    "granite4_h_moe": {
        **MAMBA_FIELDS,
        "attention.head_count_kv": [0, 2],
        "attention.scale": 1.0,
        "embedding_scale": None,
        "logit_scale": None,
        "ssm.group_count": 1,
        "feed_forward_length": 40,
        "expert_shared_feed_forward_length": 96,
        "expert_count": 5,
        "expert_used_count": 2,
    },
    "falcon_h1": {
        "attention.key_length": 16,
        "attention.value_length": 16,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 80,
        "ssm.state_size": 12,
        "ssm.time_step_rank": 8,
        "ssm.group_count": 2,
    },
    "nemotron_h": NEMOTRON_FIELDS,
    "nemotron_h_moe": NEMOTRON_MOE_FIELDS,
    "nemotron3": {
        **NEMOTRON_MOE_FIELDS,
        "block_count": 5,
        "nextn_predict_layers": 1,
        "attention.head_count_kv": [0, 0, 2, 0, 2],
        "feed_forward_length": [0, 40, 0, 40, 40],
        "moe_latent_size": 24,
    },
    "laguna": {
        "block_count": 5,
        "attention.head_count": [4, 6, 2, 6, 4],
        "attention.key_length": 24,
        "attention.value_length": 24,
        "attention.sliding_window": 20,
        "rope.dimension_count": 12,
        "rope.dimension_count_swa": 24,
        "rope.freq_base_swa": 300.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_attn_factor": 1.3,
        "leading_dense_block_count": 1,
        "expert_count": 6,
        "expert_used_count": 3,
        "expert_feed_forward_length": 40,
        "expert_shared_feed_forward_length": 48,
        "expert_weights_scale": 1.7,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    },
    "muse_glimmer": {
        "block_count": 5,
        "attention.layer_norm_rms_epsilon": 1e-3,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "attention.sliding_window": 20,
        "attention.sliding_window_pattern": [False, True, True, True, False],
        "final_logit_softcapping": 7.0,
        "logit_scale": 0.3,
    },
    "gemma4": {
        "block_count": 6,
        "attention.sliding_window": 20,
        "attention.sliding_window_pattern": [True, False] * 3,
        "attention.shared_kv_layers": 3,
        "attention.head_count_kv": [2, 1] * 3,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "attention.key_length_swa": 16,
        "attention.value_length_swa": 16,
        "rope.dimension_count": 24,
        "rope.dimension_count_swa": 16,
        "feed_forward_length": [96] * 3 + [192] * 3,
        "embedding_length_per_layer_input": 8,
        "final_logit_softcapping": 7.0,
        "rope.freq_base": 50000.0,
        "rope.freq_base_swa": 300.0,
    },
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "muse_glimmer": {"post_norm_eps": 1e-8},
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {"query_pre_attn_scalar": 16},
    "gemma4": {"vocab_size_per_layer_input": 256},
    "gemma4_moe": {"final_logit_softcapping": 7.0},
    **{key: {"sliding_window": None} for key in ("ministral3", "starcoder2")},
    **{key: {"use_sliding_window": False} for key in ("qwen2", "qwen2vl")},
    "granite4": {"intermediate_size": 96},
    "smollm3": {"no_rope_layers": None, "use_sliding_window": False, "layer_types": None},
    "qwen2_moe": {"mlp_only_layers": [], "use_sliding_window": False},
    **{key: {"mlp_only_layers": []} for key in ("qwen3_moe", "qwen3vlmoe")},
    "cohere2_moe": {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    "ernie4_5_moe": {"moe_layer_interval": 2},
    "qwen3_5": {"mtp_num_hidden_layers": 1},
    "qwen3_next": {"mlp_only_layers": []},
    "kimi_linear": {"n_group": 1, "topk_group": 1},
    "dots1": {"sliding_window": None},
    "granite4_h": {"intermediate_size": 96},
    "granite_swa": {"layer_rope_theta": [1e4, 1e4, 0, 0, 1e4]},
    "granitemoe_swa": {"layer_rope_theta": [1e4, 1e4, 0, 0, 1e4]},
    "falcon_h1": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "mistral4": {"rope_parameters": {**MINISTRAL3_ROPE, "mscale": 1.5, "llama_4_scaling_beta": 0.1}},
    "minicpm3": {"v_head_dim": None, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
}
"""The options of a checkpoint that GGUF files do not contain, because they follow from others or from the name."""

PREDICTOR = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}
INTERLEAVED = (
    "llama", "mistral", "granite", "granite4", "granite4_h", "granite4_h_moe", "smollm3", "ministral3", "mixtral",
    "granitemoe", "granitemoeshared", "arcee", "granite_swa", "granitemoe_swa",
    "muse_glimmer",
)  # fmt: skip
ARCHITECTURE_NAMES = {
    "mistral": "llama",
    "granite4": "granite",
    "olmo3": "olmo2",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "gemma4_moe": "gemma4",
    "gemma4_unified": "gemma4",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "granitemoeshared": "granitemoe",
    "cohere2_moe": "cohere2moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_moe": "hunyuan-moe",
    "gpt_oss": "gpt-oss",
    "lfm2_moe": "lfm2moe",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_next": "qwen3next",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), "deepseek2"),
    "kimi_linear": "kimi-linear",
    "cohere": "command-r",
    **dict.fromkeys(("glm4_moe", "solar_open"), "glm4moe"),
    "minimax_m2": "minimax-m2",
    "exaone_moe": "exaone-moe",
    "hunyuan": "hunyuan-dense",
    "granite4_h": "granitehybrid",
    "granite4_h_moe": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "nemotron3": "nemotron_h_moe",
    "granitemoe_swa": "granite_swa",
    "muse_glimmer": "muse-glimmer",
}
"""The names of architectures in GGUF files, where they differ."""

SAME_MODELS = {"exaone": "llama", "qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3_moe"}
"""Architectures that only GGUF files have -> the tiny model that computes the same."""


MAMBA_ARCHITECTURES = ("granite4_h", "granite4_h_moe", "falcon_h1", "nemotron_h", "nemotron_h_moe", "nemotron3")
LATENT_ARCHITECTURES = ("deepseek2", "glm4moe", "mistral4", "minicpm3", "kimi-linear")
NORMED_BRANCHES = (
    "gemma", "olmo2", "olmo3", "exaone4", "gpt", "seed_oss", "glm4_moe", "solar_open", "muse_glimmer",
)  # fmt: skip
LARGER_EPS = (
    "ernie4_5", "olmo2", "olmo3", "exaone4", "olmoe", "phi3", "ministral3", "mixtral", "gpt_oss", "lfm2", "lfm2_moe",
    "falcon_h1", "nemotron_h", "nemotron_h_moe", "nemotron3", "glm4_moe_lite", "glm4_moe", "arcee", "hunyuan",
    "minicpm3", "granite_swa", "solar_open", "hy_v3", "afmoe", "exaone_moe", "apertus",
    "hunyuan_moe", "ernie4_5_moe", "kimi_linear",
)  # fmt: skip


def convert_name(name: str, arch: str) -> str:
    names = {
        **NAMES,
        **FUSED,
        **LAYER_NORMS,
        **EXPERTS,
        **PER_LAYER_INPUTS,
        **PARALLEL_EXPERTS,
        **(LFM2 if arch.startswith("lfm2") else {}),
        **(QWEN35 if arch.startswith(("qwen3_5", "qwen3_next")) else {}),
        **(MAMBA if arch in MAMBA_ARCHITECTURES else {}),
        **(LATENT if ARCHITECTURE_NAMES.get(arch, arch) in LATENT_ARCHITECTURES else {}),
        **(AFMOE if arch == "afmoe" else {}),
        **(KIMI_LINEAR if arch == "kimi_linear" else {}),
        **(BRANCH_NORMS if arch != "gemma" and arch.startswith(NORMED_BRANCHES) and arch != "glm4_moe_lite" else {}),
    }
    if name.startswith("mtp.") and not name.startswith("mtp.layers."):
        return f"blk.4.nextn.{PREDICTOR[name.removeprefix('mtp.').removesuffix('.weight')]}.weight"
    name = name.replace("mtp.layers.0.", "model.layers.4.")
    if not name.startswith("model.layers."):
        module, _, kind = name.rpartition(".")
        return f"{names[module]}.{kind}"
    _, _, layer, rest = name.split(".", 3)
    if rest in WHOLE_NAMES:
        return f"blk.{layer}.{WHOLE_NAMES[rest]}"
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{names[module]}.{kind}"


def convert_tensor(name: str, tensor: torch.Tensor, arch: str) -> torch.Tensor:
    """Complete the weights of Gemma's norms, and interleave the rows of queries and keys where llama.cpp does."""
    if arch == "kimi_linear":  # llama.cpp's `KimiLinearModel` keeps all dimensions.
        if name.endswith("A_log"):
            return -tensor.exp()
        return tensor[None] if "conv1d" in name else tensor
    if "conv" in name and tensor.ndim == 3:
        tensor = tensor.squeeze(1)
    if arch.startswith(("qwen3_5", "qwen3_next")):
        return convert_delta(name, tensor, is_tiled=arch != "qwen3_next")
    if arch in MAMBA_ARCHITECTURES:
        tensor = convert_mamba(name, tensor, arch)
    if (arch in ("gemma", "gemma2", "gemma3") and "norm" in name) or (arch == "muse_glimmer" and "layernorm" in name):
        return tensor + 1
    if arch in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
        heads = 4 if "q_proj" in name else 2
        return tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    return tensor


def convert_mamba(name: str, tensor: torch.Tensor, arch: str) -> torch.Tensor:
    """Convert a tensor of Mamba-2 as llama.cpp's `Mamba2Model`, and multiply matrices by the factors of Falcon-H1."""
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if name.endswith(("A_log", ".D")):
        return tensor[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return tensor.reshape(1 if arch == "granite4_h_moe" else 2, -1)
    if arch != "falcon_h1":
        return tensor
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module == "in_proj" and tensor.ndim == 2:
        scales = torch.tensor([0.3, 1.4, 0.7, 0.5, 1.2]).repeat_interleave(torch.tensor([80, 80, 24, 24, 8]))
        return tensor * 0.7 * scales[:, None]
    factors = {"k_proj": 1.3 * 1.7, "q_proj": 1.3, "v_proj": 1.3, "o_proj": 0.9, "out_proj": 0.8, "gate_proj": 0.8}
    factors |= {"down_proj": 0.6, "lm_head": 0.4, "embed_tokens": 3.0}
    return tensor * factors.get(module, 1.0)


def convert_delta(name: str, tensor: torch.Tensor, *, is_tiled: bool = True) -> torch.Tensor:
    """Convert a tensor of Qwen3.5, with 2 key heads of size 8 and 4 value heads of size 12, as llama.cpp's
    `_LinearAttentionVReorderBase`: value heads, which are grouped by key head, become tiles of one head of each group.
    """
    if "norm" in name and "linear_attn" not in name:
        return tensor + 1
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if not is_tiled:
        return tensor
    rest = name.partition("linear_attn.")[2]
    if rest in ("A_log", "dt_bias") or rest.startswith(("in_proj_a", "in_proj_b")):
        return tile_heads(tensor, 1)
    if rest.startswith("in_proj_z"):
        return tile_heads(tensor, 12)
    if rest.startswith(("in_proj_qkv", "conv1d")):
        return torch.cat((tensor[:32], tile_heads(tensor[32:], 12)))
    return tile_heads(tensor.t(), 12).t() if rest.startswith("out_proj") else tensor


def tile_heads(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    return rows.reshape(2, 2, head_dim, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def split_grouped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Divide the rows of Qwen3-Next for 2 key heads of q, k, v and z as llama.cpp's converter does."""
    found = {}
    for name, tensor in tensors.items():
        if "in_proj_qkvz" in name:
            q, k, v, z = (part.flatten(0, 1) for part in tensor.view(2, 64, -1).split([8, 8, 24, 24], dim=1))
            found[name.replace("qkvz", "qkv")] = torch.cat((q, k, v))
            found[name.replace("qkvz", "z")] = z
        else:
            found[name] = tensor
    return found


def split_shared_mlp(tensors: dict[str, torch.Tensor], network: str = "mlp") -> dict[str, torch.Tensor]:
    """Divide the matrix with gate and up of Granite 4, and give its feed-forward network the names of Llama's."""
    found = {}
    for name, tensor in tensors.items():
        if "shared_mlp.input_linear" in name:
            for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                found[name.replace("shared_mlp.input_linear", f"{network}.{part}_proj")] = rows
        else:
            found[name.replace("shared_mlp.output_linear", f"{network}.down_proj")] = tensor
    return found


def split_latent(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Divide the matrix of keys of 16 and values of 20 of each head, and transpose those of keys, as llama.cpp does."""
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = tensor
            continue
        keys, values = tensor.view(4, 36, 32).split([16, 20], dim=1)
        found |= {name.replace("kv_b", "k_b"): keys.transpose(1, 2), name.replace("kv_b", "v_b"): values}
    return found


def with_head_norms(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The text model of Muse Glimmer with norms of its 5 layers whose weights contain the factor of queries."""
    prefix = "model.language_model."
    found = {name.replace(prefix, "model."): each for name, each in tensors.items() if name.startswith((prefix, "lm"))}
    norms = {"q_norm": 1.7, "k_norm": 1.0}
    for layer in range(5):
        found |= {f"model.layers.{layer}.self_attn.{name}.weight": torch.full((24,), norms[name]) for name in norms}
    return found


def split_transposed_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Divide the tensor with the alternate rows of gate and up of all experts of gpt-oss, and transpose matrices."""
    found = {}
    for name, tensor in tensors.items():
        layer, _, projection = name.partition("mlp.experts.")
        if not projection:
            found[f"{name}.weight" if name.endswith("sinks") else name] = tensor
            continue
        kind = "bias" if projection.endswith("_bias") else "weight"
        rows = tensor if kind == "bias" else tensor.transpose(1, 2)
        parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if "gate_up" in projection else {"down": rows}
        found |= {f"{layer}{part}_proj.{kind}": each for part, each in parts.items()}
    return found


EXPERT = re.compile(r"(.*\.\d+\.)(?:mlp|block_sparse_moe|feed_forward|mixer)\.experts\.(\d+)\.(\w+)\.weight")


def merge_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put the matrices of all experts of a layer into one tensor, and separate the gate from the up projection."""
    merged: dict[str, torch.Tensor] = {}
    experts: defaultdict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if found := EXPERT.fullmatch(name):
            experts[f"{found[1]}{found[3]}.weight"][int(found[2])] = tensor
        elif name.endswith("input_linear.weight"):
            layer = name.removesuffix("block_sparse_moe.input_linear.weight")
            merged |= {
                f"{layer}{part}.weight": each for part, each in zip(("w1", "w3"), tensor.chunk(2, 1), strict=True)
            }
        else:
            merged[name.replace("block_sparse_moe.output_linear", "w2")] = tensor
    return merged | {name: torch.stack([found[i] for i in sorted(found)]) for name, found in experts.items()}


def write_gguf(
    folder: Path,
    arch: str,
    path: Path,
    experts: gguf.GGMLQuantizationType | None = None,
    *,
    rounds_experts: bool = False,
    splits_latent: bool = True,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    factors: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Convert a folder to a GGUF file. A changed field of None is left out.

    Args:
        experts: the type of the matrices of experts, whose blocks are random; None for their floats.
        types: the types of tensors, to which their values are rounded, by the ends of their names.
        splits_latent: whether the matrix of keys and values of latent attention is divided, as in newer files.
        factors: further tensors.
        rounds_experts: whether the blocks have the values of the folder, rounded to the type, instead of random ones.
    """
    name = ARCHITECTURE_NAMES.get(arch, arch)
    writer = gguf.GGUFWriter(path, name)
    fields: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "block_count": 2,
        "vocab_size": 256,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5 if arch in LARGER_EPS else 1e-6,
        "rope.freq_base": {
            "smollm3": 2e6,
            "mixtral": 1e6,
            "lfm2": 1e6,
            "lfm2_moe": 1e6,
            "ernie4_5": 5e5,
            "ernie4_5_moe": 5e5,
        }.get(arch, 10000.0),
        **GGUF_FIELDS[arch],
    }
    for key, value in {**fields, **changes}.items():
        if value is not None:
            add_value(writer, f"{name}.{key}", value)
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("backbone.", "model.", 1): tensor for name, tensor in tensors.items()}
    if arch == "muse_glimmer":
        tensors = with_head_norms(tensors)
    if arch == "qwen3_next":
        tensors = split_grouped(tensors)
    for parameter in ("alpha_p", "alpha_n", "beta", "eps") if arch == "apertus" else ():
        layers = (f"model.layers.{layer}.mlp.act_fn.{parameter}" for layer in range(2))
        writer.add_array(f"xielu.{parameter}", [tensors.pop(name).item() for name in layers])
    if splits_latent and name in ("deepseek2", "mistral4", "kimi-linear"):
        tensors = split_latent(tensors)
    has_experts = arch in ("granite4_h_moe", "granitemoeshared")
    tensors = (
        split_transposed_experts(tensors)
        if arch == "gpt_oss"
        else tensors
        if arch == "granitemoe_swa"
        else merge_experts(split_shared_mlp(tensors, "shared_mlp" if has_experts else "mlp"))
    )
    for key, tensor in tensors.items():
        if experts is not None and tensor.ndim == 3:
            if rounds_experts:
                blocks = gguf.quantize(tensor.contiguous().numpy(), experts)
            else:
                blocks = random_blocks(experts, tensor.shape[0] * tensor.shape[1], tensor.shape[2], seed=len(key))
            writer.add_tensor(convert_name(key, arch), blocks.reshape(*tensor.shape[:2], -1), raw_dtype=experts)
            continue
        values = convert_tensor(key, tensor, arch).contiguous().numpy()
        kind = next((kind for end, kind in (types or {}).items() if convert_name(key, arch).endswith(end)), None)
        if kind is not None:
            values = gguf.quantize(values, kind)
        writer.add_tensor(convert_name(key, arch), values, raw_dtype=kind)
    for name, factor in (factors or {}).items():
        writer.add_tensor(name, np.array(factor, dtype=np.float32))
    if arch.startswith("gemma4"):
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * 4 + [1e30] * 8, dtype=np.float32))
    if arch in ("phi3", "minicpm3"):
        rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], dtype=np.float32))
    return finish(writer, path)


def load(folder_or_file: Path, kernels: str = "torch") -> DecoderModel:
    files = resolve_model(str(folder_or_file))
    config = files.config()
    weights = files.weights(config, torch.float32, torch.device("cpu"))
    model = build_model(config, weights, dtype=torch.float32, device="cpu", kernels=kernels)
    assert weights.unused() == []
    model.allocate_states(len(prompts()))
    return model


def assert_logits_of_transformers(model: DecoderModel, folder: Path) -> None:
    with torch.inference_mode():
        model.allocate_kv_cache(num_blocks=64, block_size=8)
        found = run(model, Tables(64, 8), [(sequence, 0, len(prompt)) for sequence, prompt in prompts().items()])
        for sequence, logits in expected_logits(folder).items():
            assert_close(found[sequence], logits, tolerance(folder))


@pytest.mark.parametrize("arch", GGUF_FIELDS)
def test_gguf_files_give_the_logits_of_transformers(
    arch: str, tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model_dir(SAME_MODELS.get(arch, arch), **OVERRIDES.get(arch, {}))
    assert_logits_of_transformers(load(write_gguf(folder, arch, tmp_path / "model.gguf")), folder)


WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "mlp_only_layers": []}


def test_experts_have_factors_of_their_own(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    fields = {"embedding_length": 256, "expert_feed_forward_length": 256}
    kind, folder = gguf.GGMLQuantizationType.NVFP4, tiny_model_dir("qwen3_moe", **WIDE)
    mixture = resolve_model(str(folder)).config().layers[0].mixture
    assert mixture is not None
    assert mixture.router is not None
    num_experts = mixture.router.num_experts
    factors = {"blk.0.ffn_up_exps.scale": [0.5 + expert for expert in range(num_experts)]}
    path = write_gguf(folder, "qwen3_moe", tmp_path / "model.gguf", kind, factors=factors, **fields)
    files = resolve_model(str(path))
    weights = files.weights(files.config(), torch.float32, torch.device("cpu"))
    blocks = next(tensor.data for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.ffn_up_exps.weight")
    for expert in range(num_experts):
        name, expected = f"model.layers.0.mlp.experts.{expert}.up_proj.weight", gguf.dequantize(blocks[expert], kind)
        assert np.array_equal(weights.tensor(name, (256, 256)).numpy(), expected * (0.5 + expert))


@needs_native
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q5_K", "MXFP4"])
def test_native_experts_are_computed_from_the_blocks_of_the_file(
    kind: str, tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """The reference computes with the dequantized values; native kernels also round activations to 8 bits.

    In some rows the rounding changes the choice of an expert, so the typical row is compared.
    """
    fields = {"embedding_length": 256, "expert_feed_forward_length": 256}
    experts = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tiny_model_dir("qwen3_moe", **WIDE), "qwen3_moe", tmp_path / "model.gguf", experts, **fields)
    formats = resolve_model(str(path)).formats(resolve_model(str(path)).config())
    assert formats("model.layers.0.mlp.experts.3.up_proj.weight") == kind.lower()
    with torch.inference_mode():
        found = []
        for kernels in ("native", "reference"):
            model = load(path, kernels)
            model.allocate_kv_cache(num_blocks=64, block_size=8)
            steps = run(model, Tables(64, 8), [(sequence, 0, len(prompt)) for sequence, prompt in prompts().items()])
            found.append(torch.cat(list(steps.values())).clone())
    native, expected = found
    errors = (native - expected).square().sum(-1).sqrt() / expected.square().sum(-1).sqrt()
    assert float(errors.median()) < 0.03
