"""Configurations with the fields of published models load; fields that change results are refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import ModelLoadError
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.registry import read_gguf_config, read_hf_config

FILE = Path(__file__).parents[1] / "data" / "published_configs.jsonl"
CONFIGS: dict[str, dict[str, Any]] = {
    config.pop("name"): {key: value for key, value in config.items() if key != "source"}
    for config in map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
}
CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("Qwen2.5-7B", {"use_mrope": True}),
    ("Qwen2.5-7B-Instruct", {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}}),
    ("Qwen3-0.6B", {"partial_rotary_factor": 0.5}),
    ("Qwen3-0.6B", {"attn_logit_softcapping": 50.0}),
    ("Qwen3-30B-A3B", {"shared_expert_intermediate_size": 512}),
    ("Qwen3-30B-A3B", {"scoring_func": "sigmoid"}),
    ("Llama-2-7b-hf", {"sliding_window": 4096}),
    ("Llama-2-7b-hf", {"num_experts": 8}),
    ("Llama-3.1-8B-Instruct", {"attention_multiplier": 0.01}),
    ("Llama-3.1-8B-Instruct", {"residual_multiplier": 0.22}),
    ("Llama-3.2-1B-Instruct", {"no_rope_layers": [1, 1, 1, 0] * 4}),
    ("Llama-3.2-1B-Instruct", {"layer_types": ["linear_attention"] * 16}),
    ("SmolLM2-135M", {"rope_interleaved": True}),
    ("gpt-oss-20b", {"is_causal": False}),
    ("Mistral-7B-v0.1", {"use_qk_norm": True}),
    ("Mistral-7B-v0.1", {"alibi": True}),
    ("OLMoE-1B-7B", {"clip_qkv": 8.0}),
    ("ERNIE-4.5-0.3B-PT", {"compression_ratio": 2.0}),
    ("EXAONE-4.0-1.2B", {"attention_bias": True}),
    ("EXAONE-4.0-1.2B", {"sliding_window": 4096, "layer_types": None, "sliding_window_pattern": "LLLG"}),
    ("OLMo-2-1124-7B", {"logit_scale": 0.0625}),
    ("gemma-2b-it", {"hidden_activation": "gelu"}),
    ("gemma-2b-it", {"use_bidirectional_attention": True}),
    ("phi-4", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("DeepSeek-R1-Distill-Llama-8B", {"kv_lora_rank": 512}),
    ("DeepSeek-V2-Lite-Chat", {"norm_topk_prob": True}),
    ("DeepSeek-V2-Lite-Chat", {"moe_layer_freq": 2}),
    ("DeepSeek-V2-Lite-Chat", {"attention_bias": True}),
    ("DeepSeek-V3", {"index_topk": 2048}),
    ("DeepSeek-V3", {"topk_group": 9}),
    ("DeepSeek-V3", {"n_group": 7}),
    ("DeepSeek-V3", {"topk_method": "greedy"}),
    ("Moonlight-16B-A3B", {"num_key_value_heads": 8}),
    ("Moonlight-16B-A3B", {"scoring_func": "softmax"}),
    ("Kimi-Linear-48B-A3B-Instruct", {"mla_use_nope": False}),
    ("Kimi-Linear-48B-A3B-Instruct", {"moe_router_activation_func": "softmax"}),
    ("Kimi-Linear-48B-A3B-Instruct", {"num_experts_per_tok": 4}),
    ("Kimi-Linear-48B-A3B-Instruct", {"tie_word_embeddings": True}),
    ("Kimi-Linear-48B-A3B-Instruct", {"mla_use_output_gate": True}),
    ("Kimi-Linear-48B-A3B-Instruct", {"gate_lower_bound": -5.0}),
    ("Kimi-Linear-48B-A3B-Instruct", {"layer_types": ["linear_attention", "sliding_attention"] * 13}),
    ("GLM-4.7-Flash", {"mlp_layer_types": ["dense", "sparse"]}),
    ("GLM-4.7-Flash", {"qk_head_dim": 64}),
    ("GLM-4.7-Flash", {"partial_rotary_factor": 0.5}),
    ("GLM-4-9B-0414", {"partial_rotary_factor": 0.26}),
    ("GLM-4.5-Air", {"scoring_func": "softmax"}),
    ("MiniMax-M2.7", {"attn_type_list": [0, 1] * 31}),
    ("MiniMax-M2.7", {"qk_norm_type": "per_head"}),
    ("MiniMax-M2.7", {"scoring_func": "softmax"}),
    ("MiniMax-M2.7", {"shared_intermediate_size": 1536}),
    ("MiniMax-M2.7", {"rotary_dim": 256}),
    ("MiniMax-M2.7", {"n_routed_experts": 8}),
    ("Solar-Open-100B", {"use_qk_norm": True}),
    ("Solar-Open-100B", {"first_k_dense_replace": 1}),
    ("dots.llm1.inst", {"scoring_func": "softmax"}),
    ("dots.llm1.inst", {"mlp_layer_types": ["sparse"] * 62}),
    ("Hy3-preview", {"moe_router_use_sigmoid": False}),
    ("Hy3-preview", {"route_norm": False}),
    ("Hy3-preview", {"qk_norm": False}),
    ("Hy3-preview", {"first_k_dense_replace": 3}),
    ("Trinity-Mini", {"route_norm": False}),
    ("Trinity-Mini", {"score_func": "softmax"}),
    ("Trinity-Mini", {"num_limited_groups": 2}),
    ("K-EXAONE-236B-A23B", {"topk_method": "greedy"}),
    ("AFM-4.5B", {"hidden_act": "silu"}),
    ("c4ai-command-r7b-12-2024", {"use_gated_activation": False}),
    ("c4ai-command-r7b-12-2024", {"position_embedding_type": "alibi"}),
    ("aya-expanse-8b", {"use_qk_norm": True}),
    ("Hunyuan-7B-Instruct", {"use_cla": True}),
    ("Hunyuan-7B-Instruct", {"attention_head_dim": 64}),
    ("aya-expanse-8b", {"logit_scale": 0}),
    ("granite-3.3-2b-instruct", {"mamba_d_conv": 4}),
    ("bert-base-uncased", {"position_embedding_type": "relative_key"}),
    ("bert-base-uncased", {"is_decoder": True}),
    ("ModernBERT-base", {"layer_types": ["full_attention"]}),
    ("Mixtral-8x7B-Instruct", {"n_shared_experts": 2}),
    ("Qwen2.5-VL-7B-Instruct", {"partial_rotary_factor": 0.5}),
    ("Youtu-LLM-2B", {"n_routed_experts": 8}),
    ("MiniCPM3-4B", {"rope_interleave": True}),
    ("NVIDIA-Nemotron-3-Super-120B-A12B-BF16", {"n_group": 2}),
    ("granite-swash-2b", {"layer_rope_theta": [10000.0, 0]}),
    ("ERNIE-4.5-21B-A3B-PT", {"use_bias": True}),
    ("ERNIE-4.5-21B-A3B-PT", {"scoring_func": "sigmoid"}),
    ("Hunyuan-A13B-Instruct", {"use_mixed_mlp_moe": False}),
    ("Hunyuan-A13B-Instruct", {"moe_topk": [8] * 31 + [7]}),
    ("Mellum2-12B-A2.5B-Base", {"use_sliding_window": False}),
    ("North-Mini-Code-1.0", {"use_parallel_block": False}),
    ("Qwen1.5-MoE-A2.7B", {"qkv_bias": False}),
    ("starcoder2-15b", {"mlp_type": "gated"}),
    ("starcoder2-15b", {"norm_type": "rms_norm"}),
    ("starcoder2-15b", {"hidden_act": "gelu"}),
]


def read(name: str, **changes: Any) -> ModelConfig:
    return read_hf_config({**CONFIGS[name], **changes}, source=f"{name}/config.json")


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configurations_load(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config = read(name)
    assert len(config.layers) > 5
    assert len(caplog.messages) == (name in ("Falcon3-7B-Instruct", "ModernBERT-base")), "these have an unknown field"


@pytest.mark.parametrize(
    ("name", "changes"), CHANGES, ids=lambda value: value if isinstance(value, str) else next(iter(value))
)
def test_fields_that_change_results_are_refused_by_name(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(
        ModelLoadError, match=rf"config\.json: (rope_scaling\.)?\w*({'|'.join(changes)}|type)"
    ) as caught:
        read(name, **changes)
    assert next(iter(changes)) in str(caught.value)


def test_decoders_whose_tokens_see_later_ones_are_encoders() -> None:
    assert read("SmolLM2-135M", is_causal=False).encoder is not None
    gemma, causal = read("gemma-3-1b-it", use_bidirectional_attention=True), read("gemma-3-1b-it")
    assert gemma.encoder is not None
    windows = [[spec.sliding_window for spec in each.attention_specs.values()] for each in (gemma, causal)]
    assert windows[0] == [None if window is None else window // 2 + 1 for window in windows[1]]


def test_unknown_fields_are_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    text = {**CONFIGS["gemma-3-4b-it"]["text_config"], "team": "x"}
    with caplog.at_level(logging.WARNING, "chairlift"):
        assert read("Qwen3-0.6B", my_note="x", trained_tokens=5, use_mrope=False, use_cache_v2=True) == read(
            "Qwen3-0.6B"
        )
        read("gemma-3-4b-it", text_config=text)
    first, second = caplog.messages
    assert first.endswith("the llama architecture does not read these fields: my_note, trained_tokens")
    assert second.endswith(": text_config.team")


@pytest.mark.parametrize(
    "neutral",
    [
        {"use_qk_norm": False, "num_shared_experts": 0, "mamba_layers": [], "clip_qkv": None},
        {"residual_multiplier": 1.0, "logits_scaling": 1, "logit_scale": 1.0},
        {"is_causal": True, "use_rope": True},
        {"attention_dropout_rate": 0.1, "use_flash_attn_3": True, "activation": "silu"},
    ],
)
def test_values_that_switch_a_field_off_are_neutral(neutral: dict[str, Any]) -> None:
    assert read("SmolLM2-135M", **neutral) == read("SmolLM2-135M")


def test_fields_that_a_file_of_ernie_lacks_have_the_defaults_of_transformers() -> None:
    name = "ERNIE-4.5-0.3B-PT"
    assert read(name, num_key_value_heads=None, rms_norm_eps=None, head_dim=None) == read(name)


def ropes(config: ModelConfig) -> set[RopeConfig | None]:
    return {layer.attention.rope for layer in config.layers}


def test_the_original_length_of_yarn_is_the_context() -> None:
    (rope,) = ropes(read("Qwen2.5-Coder-32B-yarn"))
    assert rope is not None
    assert (rope.factor, rope.original_max_position_embeddings) == (4.0, 32768)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    (inner,) = ropes(read("Qwen3-0.6B", rope_scaling=scaling))
    (outer,) = ropes(read("Qwen3-0.6B", rope_scaling=scaling, original_max_position_embeddings=2048))
    assert inner is not None
    assert outer is not None
    assert (inner.original_max_position_embeddings, outer.original_max_position_embeddings) == (4096, 2048)


def test_the_original_length_of_yarn_in_gguf_is_the_context() -> None:
    sizes = {"context_length": 4096, "embedding_length": 64, "feed_forward_length": 96, "block_count": 1}
    other = {"attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": 256}
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
    fields = {f"llama.{key}": value for key, value in {**sizes, **other, **scaling}.items()}
    (rope,) = ropes(read_gguf_config({"general.architecture": "llama", **fields}, source="m.gguf"))
    assert rope is not None
    assert rope.original_max_position_embeddings == 4096


@pytest.mark.parametrize(("name", "bare"), [("Qwen3-0.6B", "Qwen3Model"), ("gemma-3-1b-it", "Gemma3TextModel")])
def test_names_of_models_without_head(name: str, bare: str) -> None:
    assert read(name, architectures=[bare]) == read(name)


def test_text_models_of_wrappers_have_the_fields_that_their_files_leave_out() -> None:
    llava, qwen, mixture = map(read, ("llava-1.5-7b-hf", "Qwen2.5-VL-7B-Instruct", "Qwen3-VL-30B-A3B-Instruct"))
    assert (llava.num_layers, llava.hidden_size, llava.vocab_size, llava.eos_token_ids) == (32, 4096, 32064, (2,))
    assert (qwen.architecture, qwen.name, qwen.wrapper) == ("llama", "qwen2", "Qwen2_5_VLForConditionalGeneration")
    assert ropes(qwen) == {RopeConfig(theta=1e6)}
    assert ropes(mixture) == {RopeConfig(theta=5e6)}
    assert mixture.layers[0].mixture.router.routing.softmax == "chosen"
    text = {**CONFIGS["Qwen2.5-VL-7B-Instruct"], "architectures": None, "model_type": "qwen2_5_vl_text"}
    assert read("Qwen2.5-VL-7B-Instruct", text_config=text) == qwen


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("ERNIE-4.5-21B-A3B-PT", 21.8),
        ("Hunyuan-A13B-Instruct", 80.4),
        ("Mellum2-12B-A2.5B-Base", 12.1),
        ("North-Mini-Code-1.0", 30.5),
        ("Qwen1.5-MoE-A2.7B", 14.3),
    ],
)
def test_mixtures_have_the_number_of_weights_of_their_names(name: str, billions: float) -> None:
    assert sum(matrix.num_weights for matrix in read(name).matrices) / 1e9 == pytest.approx(billions, abs=0.1)
