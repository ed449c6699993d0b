"""Fixtures shared by all tests: the default model, and tiny random models written by transformers."""

from __future__ import annotations

import gc
import inspect
import json
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import HealthCheck, settings
from safetensors.torch import load_file, save_file

from chairlift.kernels.kernel_set import KERNEL_SETS
from waiting import AMPLE_SECONDS

KERNEL_SETS["reference"] = "reference_kernels:ReferenceKernelSet"
torch.set_num_threads(1)
# How long an example takes depends on what else the machine does.
settings.register_profile("chairlift", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("chairlift")
# So does how long a server takes: calls without a timeout would have httpx's default of 5 seconds.
vars(inspect.signature(httpx.Client).parameters["timeout"].default).update(httpx.Timeout(AMPLE_SECONDS).as_dict())
# Each client would read all certificates of the machine, which takes 35 ms.
httpx._transports.default.create_ssl_context = cache(httpx.create_ssl_context)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude imported modules and collected tests from garbage collection, which would visit them in every test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the page tests, which need a browser, to `make test-pages`."""
    is_chosen = any("pages" in argument for argument in config.args)
    return True if collection_path.name == "pages" and not is_chosen else None


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
HUNYUAN_ROPE: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 5.0, "factor": 1.0}
OLMO3_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": YARN_ROPE,
}
TINY_LATENT: dict[str, Any] = {
    **TINY_GATED,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
TINY_GROUPS: dict[str, Any] = {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
    "original_max_position_embeddings": 256,
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
    "nemotron_h_moe": (
        "NemotronH",
        {
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
        },
    ),
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
    "hunyuan": ("HunYuanDenseV1", {**TINY_GATED, "head_dim": 24, "rope_parameters": HUNYUAN_ROPE}),
    "olmo2": ("Olmo2", TINY_GATED),
    "arcee": ("Arcee", TINY_GATED),
    "seed_oss": ("SeedOss", {**TINY_GATED, "head_dim": 24, "attention_out_bias": True}),
    "phi3": (
        "Phi3",
        {
            **TINY_GATED,
            "original_max_position_embeddings": 256,
            "rope_parameters": {**LONG_ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "olmo3": (
        "Olmo3",
        {**TINY_GATED, "num_hidden_layers": 4, "sliding_window": 20, "rope_parameters": OLMO3_ROPES},
    ),
    "ernie4_5": ("Ernie4_5", {**TINY_GATED, "head_dim": 24, "use_bias": True}),
    "exaone4": ("Exaone4", {**TINY_GATED, "num_hidden_layers": 4, "sliding_window": 20}),
    "mixtral": ("Mixtral", {**TINY_GATED, "sliding_window": 24, "num_local_experts": 5, "num_experts_per_tok": 2}),
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
            "linear_num_key_heads": 4,  # transformers writes a convolution of three equal parts
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 12,
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
    "glm4_moe_lite": ("Glm4MoeLite", {**TINY_LATENT, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0}),
}


def _randomize(model: torch.nn.Module) -> None:
    """Give every parameter, biases and norms included, values that a mix-up would show, and the scales of layers.

    The biases before the activation of gpt-oss are so large that it is clamped.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("layer_scalar", "expert_bias", "correction_bias")):
                buffer.uniform_(0.5, 1.5, generator=generator)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * (4 if "gate_up_proj_bias" in name else 0.2)
            parameter.copy_(noise + 1.0 if "norm.weight" in name else noise)


def _write_tiny_model(arch: str, folder: Path, overrides: dict[str, Any], max_shard_size: str) -> None:
    import transformers

    family, extra = TINY_MODELS[arch]
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = model_class(model_class.config_class(**{**TINY_COMMON, **extra, **overrides})).to(torch.float32).eval()
    _randomize(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if overrides.get("mtp_num_hidden_layers"):
        _add_predictor(folder / "model.safetensors")


def _add_predictor(path: Path) -> None:
    """Add a predictor to the weights of Qwen3.5. Model and predictor follow the embedding of their last token, so its
    tokens are often those of the model."""
    tensors, generator = load_file(path), torch.Generator().manual_seed(1)

    def noise(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator) * scale

    tensors["model.embed_tokens.weight"] *= 200
    for name in [name for name in tensors if name.startswith("model.layers.3.")]:
        scale = 0.02 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.2
        tensors[name.replace("model.layers.3.", "mtp.layers.0.")] = noise(tensors[name], scale)
    norm = tensors["model.norm.weight"]
    first = noise(norm, 0.2)
    both = torch.cat((torch.diag(1 / (1 + first)), noise(torch.empty(64, 64), 0.02)), dim=1)
    tensors |= {"mtp.norm.weight": norm + noise(norm, 0.1), "mtp.pre_fc_norm_hidden.weight": noise(norm, 0.2)}
    tensors |= {"mtp.pre_fc_norm_embedding.weight": first, "mtp.fc.weight": both}
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model_dir(arch, max_shard_size="1GB", **config overrides)` -> a folder that transformers wrote.

    `arch` is a key of TINY_MODELS: fp32, hidden 64, 2 layers or more, 4 heads (2 of K and V but for OPT), vocabulary
    256, random with a fixed seed. The same arguments give the same folder: treat it as read-only. OPT, Gemma 2, Gemma 3
    and "gemma4" tie their embeddings. With mtp_num_hidden_layers=1 the folder has a predictor as well.
    """
    made: dict[str, Path] = {}

    def make(arch: str, *, max_shard_size: str = "1GB", **overrides: Any) -> Path:
        key = json.dumps([arch, max_shard_size, overrides], sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"tiny_{arch}")
            _write_tiny_model(arch, folder, overrides, max_shard_size)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model, SmolLM2-135M-Instruct, fetched into the model cache once."""
    from chairlift.loading.fetch import fetch_model

    return fetch_model()
