"""Creates models with random weights, for the speed of sizes that no package contains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from chairlift.loading.resolve import resolve_model

RANDOM_MODELS: Final[dict[str, dict[str, Any]]] = {
    "random-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
    },
    # The layers of Qwen3-30B-A3B, https://huggingface.co/Qwen/Qwen3-30B-A3B, with 6 of 48 and a smaller vocabulary.
    "random-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 49152,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "initializer_range": 0.02,
    },
    # The layers of LFM2-1.2B, https://huggingface.co/LiquidAI/LFM2-1.2B, with a smaller vocabulary.
    "random-lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "conv_bias": False,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.02,
    },
    # The layers of Qwen3.5-0.8B, https://huggingface.co/Qwen/Qwen3.5-0.8B, with a smaller vocabulary.
    "random-qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention" if layer % 4 < 3 else "full_attention" for layer in range(24)],
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "intermediate_size": 3584,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "max_position_embeddings": 40960,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.02,
    },
    # The text layers of Muse Glimmer 30B, https://huggingface.co/meta-models/Muse-Glimmer-30B, with 4 of 52, a smaller
    # vocabulary, and a tower of images of one layer.
    "random-muse-glimmer": {
        "architectures": ["MuseGlimmerForConditionalGeneration"],
        "model_type": "muse_glimmer",
        "text_config": {
            "hidden_size": 6656,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "layer_rope_theta": [500000.0] * 3 + [0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "intermediate_size": 19968,
            "sliding_window": 2048,
            "vocab_size": 49152,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "dtype": "bfloat16",
        },
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        "out_hidden_size": 256,
        "dtype": "bfloat16",
    },
    # The layers of Laguna XS 2.1, https://huggingface.co/poolside/Laguna-XS-2.1, with 4 of 40 and a smaller vocabulary.
    "random-laguna": {
        "architectures": ["LagunaForCausalLM"],
        "model_type": "laguna",
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "gating": "per-head",
        "gating_types": ["per_head"] * 4,
        "num_attention_heads": 48,
        "num_attention_heads_per_layer": [48, 64, 64, 64],
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 512,
        "intermediate_size": 8192,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 8192,
                "attention_factor": 1.3465735902799727,
                "beta_fast": 64.0,
                "beta_slow": 1.0,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
        "vocab_size": 49152,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "bfloat16",
    },
}
"""The config.json of each model, in bfloat16, by its name in `--model`."""

DONE: Final = "tokenizer_config.json"
"""The file that is written last."""


def random_model(name: str, folder: Path) -> Path:
    """The folder of a model of RANDOM_MODELS below `folder`. It is created once, and always has the same weights.

    It has the tokenizer of the default model, whose vocabulary has the same size. transformers draws the weights:
    N(0, 0.02^2) for matrices, ones for norms.
    """
    target = folder / name
    if not (target / DONE).exists():
        import transformers

        fields = dict(RANDOM_MODELS[name])
        config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        transformers.set_seed(0)
        getattr(transformers, fields["architectures"][0])._from_config(config).save_pretrained(target)
        _write_tokenizer(target)
    return target


def _write_tokenizer(target: Path) -> None:
    tokenizer = resolve_model(None).tokenizer()
    tokenizer.backend.save(str(target / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    (target / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
