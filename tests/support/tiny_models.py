"""The tiny models of the tests, one for each architecture, and the properties that their cases protect.

Logits, planned bytes and GGUF files are compared for every architecture, because each has its own readers and layers.
What depends only on a kind of layer or memory is tested with one architecture of that kind. `CASES` has these
properties as columns: a case beyond them repeats another one.
"""

from __future__ import annotations

import copy
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch
    import transformers

TINY_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TINY_GATED: dict[str, Any] = {"intermediate_size": 96, "num_key_value_heads": 2, "tie_word_embeddings": False}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA3_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
}
GEMMA4_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 50000.0, "partial_rotary_factor": 0.35},
}
YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MINISTRAL3_ROPE: dict[str, Any] = {
    **YARN_ROPE,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.5,
    "llama_4_scaling_beta": 0.7,
}
LAGUNA_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0},
    "full_attention": {**YARN_ROPE, "partial_rotary_factor": 0.5, "attention_factor": 1.3},
}
HUNYUAN_ROPE: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 5.0, "factor": 1.0}
OLMO3_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": YARN_ROPE,
}
TINY_DENSE_LATENT: dict[str, Any] = {
    **TINY_GATED,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
TINY_LATENT: dict[str, Any] = {
    **TINY_DENSE_LATENT,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
TINY_ROUTED: dict[str, Any] = {
    **TINY_GATED,
    "num_hidden_layers": 3,
    "head_dim": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 40,
}
TINY_GROUPS: dict[str, Any] = {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
    "original_max_position_embeddings": 256,
}
TINY_GRANITE_SWA: dict[str, Any] = {
    **TINY_GATED,
    "num_hidden_layers": 5,
    "sliding_window": 20,
    "layer_rope_theta": [10000.0, 300.0, 0, 0.0, 5000],
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}
TINY_NEMOTRON_MOE: dict[str, Any] = {
    **TINY_GATED,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "head_dim": 24,
    "mamba_num_heads": 6,
    "mamba_head_dim": 20,
    "n_groups": 2,
    "ssm_state_size": 12,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 2.5,
}
TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", TINY_GATED),
    "llama3": ("Llama", {**TINY_GATED, "rope_parameters": LLAMA3_ROPE}),
    "mistral": ("Mistral", {**TINY_GATED, "sliding_window": 24}),
    "qwen2": ("Qwen2", {**TINY_GATED, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**TINY_GATED, "head_dim": 16}),
    "gemma": ("Gemma", {**TINY_GATED, "head_dim": 24, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            **TINY_GATED,
            "num_hidden_layers": 4,
            "head_dim": 24,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 40,
            "sliding_window": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 7.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **TINY_GATED,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 40,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": GEMMA3_ROPES,
            "final_logit_softcapping": 7.0,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            **TINY_GATED,
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 260,
            "tie_word_embeddings": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "rope_parameters": GEMMA4_ROPES,
            "final_logit_softcapping": 7.0,
        },
    ),
    "gemma4_moe": (
        "Gemma4",
        {
            **TINY_GATED,
            "head_dim": 16,
            "global_head_dim": 24,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": GEMMA4_ROPES,
        },
    ),
    "gemma4_unified": (
        "Gemma4Unified",
        {
            **TINY_GATED,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": GEMMA4_ROPES,
            "final_logit_softcapping": 7.0,
        },
    ),
    "ministral3": (
        "Ministral3",
        {**TINY_GATED, "head_dim": 24, "sliding_window": 40, "rope_parameters": MINISTRAL3_ROPE},
    ),
    "granite": (
        "Granite",
        {
            **TINY_GATED,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {
            **TINY_GATED,
            "intermediate_size": 80,
            "shared_intermediate_size": 96,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ["full_attention", "full_attention"],
            "position_embedding_type": "rope",
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
    ),
    "granite4_h": (
        "GraniteMoeHybrid",
        {
            **TINY_GATED,
            "num_hidden_layers": 3,
            "intermediate_size": 80,
            "shared_intermediate_size": 96,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            **TINY_GATED,
            "mamba_d_ssm": 80,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "mlp_multipliers": [0.8, 0.6],
            "ssm_multipliers": [0.3, 1.4, 0.7, 0.5, 1.2],
            "key_multiplier": 1.7,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 0.7,
            "ssm_out_multiplier": 0.8,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.4,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            **TINY_GATED,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "head_dim": 24,
            "mamba_num_heads": 6,
            "mamba_head_dim": 20,
            "n_groups": 2,
            "ssm_state_size": 12,
        },
    ),
    "granite4_h_moe": (
        "GraniteMoeHybrid",
        {
            **TINY_GATED,
            "intermediate_size": 40,
            "shared_intermediate_size": 96,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "residual_multiplier": 0.4,
            "mamba_n_heads": 8,
            "mamba_d_state": 12,
        },
    ),
    "nemotron_h_moe": ("NemotronH", TINY_NEMOTRON_MOE),
    "nemotron3": ("NemotronH", {**TINY_NEMOTRON_MOE, "moe_latent_size": 24, "num_nextn_predict_layers": 1}),
    "smollm3": (
        "SmolLM3",
        {
            **TINY_GATED,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "cohere": ("Cohere", {**TINY_GATED, "tie_word_embeddings": True, "attention_bias": True}),
    "cohere2": ("Cohere2", {**TINY_GATED, "tie_word_embeddings": True, "num_hidden_layers": 4, "sliding_window": 20}),
    "cohere2_moe": (
        "Cohere2Moe",
        {
            **TINY_GATED,
            "num_hidden_layers": 5,
            "head_dim": 24,
            "intermediate_size": 40,
            "prefix_dense_intermediate_size": 96,
            "first_k_dense_replace": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "sliding_window": 20,
        },
    ),
    "hunyuan": ("HunYuanDenseV1", {**TINY_GATED, "head_dim": 24, "rope_parameters": HUNYUAN_ROPE}),
    "hunyuan_moe": (
        "HunYuanMoEV1",
        {
            **TINY_GATED,
            "intermediate_size": 40,
            "head_dim": 24,
            "num_experts": 6,
            "moe_topk": 3,
            "rope_parameters": HUNYUAN_ROPE,
        },
    ),
    "olmo2": ("Olmo2", TINY_GATED),
    "arcee": ("Arcee", TINY_GATED),
    "apertus": ("Apertus", {**TINY_GATED, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "seed_oss": ("SeedOss", {**TINY_GATED, "head_dim": 24, "attention_out_bias": True}),
    "phi3": (
        "Phi3",
        {
            **TINY_GATED,
            "original_max_position_embeddings": 256,
            "rope_parameters": {**LONG_ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "olmo3": ("Olmo3", {**TINY_GATED, "num_hidden_layers": 4, "sliding_window": 20, "rope_parameters": OLMO3_ROPES}),
    "ernie4_5": ("Ernie4_5", {**TINY_GATED, "head_dim": 24, "use_bias": True}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            **TINY_GATED,
            "num_hidden_layers": 4,
            "head_dim": 24,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 40,
        },
    ),
    "exaone4": ("Exaone4", {**TINY_GATED, "num_hidden_layers": 4, "sliding_window": 20}),
    "mixtral": ("Mixtral", {**TINY_GATED, "sliding_window": 24, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **TINY_GATED,
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 48,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **TINY_GATED,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "mellum": (
        "Mellum",
        {
            **TINY_GATED,
            "num_hidden_layers": 4,
            "head_dim": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "sliding_window": 20,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {**OLMO3_ROPES, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}},
        },
    ),
    "olmoe": (
        "Olmoe",
        {**TINY_GATED, "intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False},
    ),
    "granitemoe": (
        "GraniteMoe",
        {
            **TINY_GATED,
            "intermediate_size": 40,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
    ),
    "granitemoeshared": (
        "GraniteMoeShared",
        {
            **TINY_GATED,
            "intermediate_size": 40,
            "shared_intermediate_size": 56,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
        },
    ),
    "granite_swa": ("GraniteSWA", TINY_GRANITE_SWA),
    "granitemoe_swa": (
        "GraniteMoeSWA",
        {
            **TINY_GRANITE_SWA,
            "intermediate_size": 40,
            "shared_intermediate_size": 48,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **TINY_GATED,
            "intermediate_size": 40,
            "head_dim": 24,
            "sliding_window": 20,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_parameters": {**YARN_ROPE, "truncate": False},
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            **TINY_GATED,
            "num_hidden_layers": 4,
            "tie_word_embeddings": True,
            "block_multiple_of": 24,
            "block_ffn_dim_multiplier": 1.3,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            **TINY_GATED,
            "num_hidden_layers": 4,
            "num_dense_layers": 1,
            "moe_intermediate_size": 40,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            **TINY_GATED,
            "num_hidden_layers": 4,
            "head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            **TINY_GATED,
            "num_hidden_layers": 4,
            "head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        {
            **TINY_GATED,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 20,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **TINY_GATED,
            "num_hidden_layers": 4,
            "head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **TINY_LATENT,
            **TINY_GROUPS,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v3": ("DeepseekV3", {**TINY_LATENT, **TINY_GROUPS}),
    "kimi_linear": (
        "KimiLinear",
        {
            **TINY_LATENT,
            **TINY_GROUPS,
            "num_hidden_layers": 4,
            "q_lora_rank": None,
            "n_routed_experts": None,
            "num_local_experts": 8,
            "linear_num_heads": 4,
            "linear_head_dim": 12,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "glm4": ("Glm4", {**TINY_GATED, "head_dim": 24}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **TINY_GATED,
            "num_hidden_layers": 3,
            "head_dim": 24,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "solar_open": (
        "SolarOpen",
        {
            **TINY_GATED,
            "head_dim": 24,
            "attention_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "dots1": (
        "Dots1",
        {
            **TINY_GATED,
            **TINY_GROUPS,
            "num_hidden_layers": 3,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.7,
            "sliding_window": 20,
            "max_window_layers": 2,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            **TINY_GATED,
            "intermediate_size": 40,
            "head_dim": 24,
            "rotary_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "hy_v3": ("HYV3", {**TINY_ROUTED, "router_scaling_factor": 1.7}),
    "afmoe": (
        "Afmoe",
        {**TINY_ROUTED, "num_hidden_layers": 5, "route_scale": 1.7, "mup_enabled": True, "sliding_window": 20},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {**TINY_ROUTED, "num_hidden_layers": 5, "n_group": 4, "topk_group": 2, "sliding_window": 24},
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**TINY_LATENT, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    "mistral4": (
        "Mistral4",
        {
            **TINY_LATENT,
            "first_k_dense_replace": 1,
            "rope_parameters": {**MINISTRAL3_ROPE, "partial_rotary_factor": 1 / 3},
        },
    ),
    # transformers clears the embedding of the padding token when it loads this model.
    "youtu": ("Youtu", {**TINY_DENSE_LATENT, "pad_token_id": None}),
    "minicpm3": (
        "MiniCPM3",
        {**TINY_DENSE_LATENT, "scale_emb": 3.0, "scale_depth": 0.7, "dim_model_base": 24, "rope_parameters": LONG_ROPE},
    ),
    "muse_glimmer": (
        "MuseGlimmer",
        {
            **TINY_GATED,
            "num_hidden_layers": 5,
            "head_dim": 24,
            "sliding_window": 20,
            "rms_norm_eps": 1e-3,
            "post_norm_eps": 1e-2,
            "qk_scale_factor": 1.7,
            "output_multiplier": 0.3,
            "final_logit_softcapping": 7.0,
        },
    ),
    "laguna": (
        "Laguna",
        {
            **TINY_GATED,
            "num_hidden_layers": 5,
            "num_attention_heads_per_layer": [4, 6, 2, 6, 4],
            "head_dim": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 48,
            "moe_routed_scaling_factor": 1.7,
            "sliding_window": 20,
            "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
            "rope_parameters": LAGUNA_ROPES,
        },
    ),
    "lfm3": (
        "Lfm3",
        {
            **TINY_GATED,
            "num_hidden_layers": 6,
            "head_dim": 24,
            "tie_word_embeddings": True,
            "sliding_window": 20,
            "layer_types": [
                "conv",
                "full_attention",
                "sliding_attention",
                "conv",
                "sliding_attention",
                "full_attention",
            ],
        },
    ),
    "starcoder2": ("Starcoder2", {**TINY_GATED, "sliding_window": 24, "norm_epsilon": 1e-3}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0}),
}


CASES: Final = """
architecture    engine  layout  torch  bits  recorded  windows  states  names  tensors  planned
llama           x       x       x      .     x         .        .       x      .        x
llama3          .       .       .      .     .         .        .       .      .        .
mistral         x       x       .      .     x         x        .       .      .        .
qwen2           x       .       .      .     x         x        .       .      .        .
qwen3           .       .       .      .     x         .        .       .      .        .
gemma           .       .       .      .     .         .        .       .      .        .
gemma2          x       .       .      x     .         .        .       .      .        .
gemma3          x       x       .      x     .         x        .       .      .        .
gemma4          x       x       x      x     x         .        .       x      .        x
gemma4_moe      x       .       .      .     x         .        .       .      .        x
gemma4_unified  .       .       .      .     .         .        .       .      .        .
ministral3      x       .       .      x     x         .        .       .      .        .
granite         .       .       .      x     .         .        .       .      .        .
granite4        .       .       .      .     .         .        .       .      .        .
granite4_h      x       x       x      .     .         .        x       x      .        x
falcon_h1       x       x       .      .     .         .        x       .      .        .
nemotron_h      x       .       .      .     .         .        x       .      .        .
granite4_h_moe  .       .       .      .     .         .        .       .      .        x
nemotron_h_moe  .       .       .      .     .         .        .       .      .        x
nemotron3       .       .       .      .     .         .        .       .      .        x
smollm3         x       .       .      .     .         x        .       .      .        .
cohere          .       .       .      .     .         .        .       .      x        .
cohere2         x       .       .      .     .         .        .       .      .        x
cohere2_moe     x       .       .      .     .         .        .       .      .        .
hunyuan         .       .       .      .     .         .        .       .      .        .
hunyuan_moe     .       .       .      .     .         .        .       .      .        .
olmo2           .       .       .      .     .         .        .       .      .        .
arcee           .       .       .      .     .         .        .       .      .        .
apertus         .       .       .      x     .         .        .       .      .        .
seed_oss        .       .       .      .     .         .        .       .      .        .
phi3            x       .       .      .     .         x        .       x      .        x
olmo3           .       .       .      x     .         .        .       .      .        .
ernie4_5        .       .       .      .     .         .        .       .      x        .
ernie4_5_moe    .       .       .      .     .         .        .       .      .        .
exaone4         .       .       .      .     .         .        .       .      .        .
mixtral         x       .       .      .     .         .        .       .      x        .
qwen2_moe       .       .       .      .     .         .        .       .      .        .
qwen3_moe       .       .       .      .     x         .        .       .      .        x
mellum          .       .       .      .     .         .        .       .      .        .
olmoe           .       .       .      .     .         .        .       .      .        x
granitemoe      .       .       .      .     .         .        .       .      x        .
granitemoeshared .      .       .      .     .         .        .       .      .        .
granite_swa     x       .       .      .     .         .        .       .      .        .
granitemoe_swa  .       .       .      .     .         .        .       .      x        .
gpt_oss         x       .       .      x     .         x        .       .      x        x
lfm2            x       x       x      .     .         .        x       x      .        .
lfm2_moe        .       .       .      x     .         .        .       .      .        x
qwen3_5         x       x       x      x     .         .        x       .      .        .
qwen3_5_moe     .       .       .      x     .         .        .       .      x        x
olmo_hybrid     .       .       .      .     .         .        .       .      x        x
qwen3_next      .       .       .      .     .         .        .       .      .        .
deepseek_v2     .       .       .      .     .         .        .       .      .        .
deepseek_v3     x       .       .      .     .         .        .       .      x        x
kimi_linear     x       .       .      x     .         .        x       .      x        x
glm4            .       .       .      .     .         .        .       .      .        .
glm4_moe        .       .       .      .     .         .        .       .      .        .
glm4_moe_lite   x       x       x      .     .         .        .       .      .        .
mistral4        x       .       .      .     .         .        .       .      x        .
youtu           .       .       .      .     .         .        .       .      .        .
minicpm3        x       .       .      .     .         .        .       .      .        .
solar_open      .       .       .      .     .         .        .       .      .        .
dots1           .       .       .      .     .         .        .       .      .        .
minimax_m2      x       .       .      x     .         .        .       .      x        .
hy_v3           .       .       .      .     .         .        .       .      x        .
afmoe           x       x       .      x     x         x        .       .      .        x
exaone_moe      .       .       .      .     .         x        .       .      .        .
muse_glimmer    x       .       .      x     x         .        .       .      .        x
laguna          x       .       .      x     .         x        .       .      x        x
lfm3            x       .       .      x     .         .        x       .      x        x
starcoder2      .       .       .      x     .         .        .       .      .        .
opt             x       .       .      .     x         .        .       x      .        x
"""
"""The properties that a case of an architecture protects.

- engine: greedy tokens under the hardest limits, for each kind of attention, position, state and feed-forward layer.
- layout: the same under all hard limits, for each layout of KV memory.
- torch: the same with torch's kernels.
- bits: logits that do not depend on batch, chunks, blocks and threads, to the last bit.
- recorded: steps that are replayed from a recording.
- windows: blocks that are released when they leave a window.
- states: bits of state that do not depend on the division of a prompt.
- names: parameters that have the names of transformers, in one file and in shards.
- tensors: each other way in which files store the matrices of a layer, in one file and in shards.
- planned: the bytes of packed matrices, for each kind of matrix.
"""


EVERY_ARCHITECTURE: Final = "EVERY_ARCHITECTURE" in os.environ
"""Whether each architecture has the cases of the table in docs/models.md, which `benchmarks.model_table` sets."""


def architectures_with(property_name: str) -> list[str]:
    """The architectures whose cases protect a property, which is a column of `CASES`."""
    if EVERY_ARCHITECTURE and property_name in ("engine", "bits", "planned"):
        return [*TINY_MODELS]
    (_, *names), *rows = [line.split() for line in CASES.strip().splitlines()]
    column = 1 + names.index(property_name)
    return [row[0] for row in rows if row[column] == "x"]


def make_tiny_config(arch: str, **overrides: Any) -> tuple[Any, transformers.PretrainedConfig]:
    """The class of a tiny model, and its configuration."""
    import transformers

    family, extra = TINY_MODELS[arch]
    fields = {**TINY_COMMON, **extra, **overrides}
    if (model_class := getattr(transformers, f"{family}ForCausalLM", None)) is not None:
        if family == "Mistral4":  # AutoModelForCausalLM of transformers 5.24 does not list it.
            transformers.AutoModelForCausalLM.register(model_class.config_class, model_class, exist_ok=True)
        return model_class, model_class.config_class(**fields)
    model_class = getattr(transformers, f"{family}ForConditionalGeneration")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return model_class, model_class.config_class(text_config=fields, vision_config=sizes)


def load_reference(folder: Path, **options: Any) -> Any:
    """The model of transformers in a folder, in float32. The caller may change it."""
    return copy.deepcopy(_read_reference(folder, tuple(options.items())))


@lru_cache(maxsize=2)
def _read_reference(folder: Path, options: tuple[tuple[str, Any], ...]) -> Any:
    import torch
    import transformers

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, **dict(options)).eval()


def randomize(model: torch.nn.Module) -> None:
    """Give every parameter, biases and norms included, values that a mix-up would show, and the scales of layers.

    The biases before the activation of gpt-oss are so large that it is clamped.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("layer_scalar", "expert_bias", "correction_bias")):
                buffer.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith(("act_fn.beta", "act_fn.eps")):
                buffer.uniform_(0.2, 0.7, generator=generator).mul_(-1 if name.endswith("eps") else 1)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * (4 if "gate_up_proj_bias" in name else 0.2)
            parameter.copy_(noise + 1.0 if "norm.weight" in name else noise)
