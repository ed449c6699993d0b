"""Configurations written by transformers and GGUF metadata are read correctly; errors name unsupported fields."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chairlift.errors import ModelLoadError
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.registry import read_gguf_config, read_hf_config

TinyModelDir = Callable[..., Path]


def read(folder: Path) -> ModelConfig:
    generation = folder / "generation_config.json"
    return read_hf_config(
        json.loads((folder / "config.json").read_text()),
        source=str(folder / "config.json"),
        generation_config=json.loads(generation.read_text()) if generation.exists() else None,
    )


def rope_of(config: ModelConfig) -> RopeConfig | None:
    (rope,) = {layer.attention.rope for layer in config.layers}
    return rope


def windows_of(config: ModelConfig) -> list[int | None]:
    return [layer.attention.sliding_window for layer in config.layers]


@pytest.mark.parametrize("arch", ["llama", "llama3", "mistral", "qwen2", "qwen3"])
def test_dimensions_of_configs_written_by_transformers(tiny_model_dir: TinyModelDir, arch: str) -> None:
    config = read(tiny_model_dir(arch))
    assert config.architecture == "llama"
    assert config.name == {"llama3": "llama"}.get(arch, arch)
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (256, 64, 2)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (256, False)
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (1, (2,), "float32")
    windows = [layer.attention.sliding_window for layer in config.layers]
    assert windows == {"mistral": [24, 24], "qwen2": [None, 20]}.get(arch, [None, None])
    for layer in config.layers:
        attention, mlp = layer.attention, layer.feed_forward
        assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 16)
        assert (mlp.inner_size, mlp.activation, mlp.gated) == (96, "silu", True)
        assert [norm.eps for norm in layer.norms] == [1e-6] * (4 if arch == "qwen3" else 2)
        assert attention.qkv.has_bias is (arch == "qwen2")
        assert not attention.output.has_bias
        assert not mlp.up.has_bias
        assert (attention.head_norm is not None) is (arch == "qwen3")
    assert config.kv_values_per_token == 2 * 2 * 2 * 16


def test_llama3_rope(tiny_model_dir: TinyModelDir) -> None:
    assert rope_of(read(tiny_model_dir("llama3"))) == RopeConfig(
        theta=10000.0,
        scaling="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )


def test_opt(tiny_model_dir: TinyModelDir) -> None:
    config = read(tiny_model_dir("opt"))
    assert (config.architecture, config.tie_word_embeddings) == ("opt", True)
    for layer in config.layers:
        attention, mlp = layer.attention, layer.feed_forward
        assert (attention.num_kv_heads, attention.head_dim, mlp.inner_size) == (4, 16, 96)
        assert (mlp.activation, mlp.gated, attention.rope) == ("relu", False, None)
        assert all(matrix.has_bias for matrix in layer.matrices)
        assert layer.attention_norms.before is not None
    assert config.final_norm is not None
    assert config.project_in is None


def test_opt_350m_shape(tiny_model_dir: TinyModelDir) -> None:
    config = read(tiny_model_dir("opt", do_layer_norm_before=False, word_embed_proj_dim=32))
    assert [layer.attention_norms.before for layer in config.layers] == [None, None]
    assert all(layer.feed_forward_norms.of_sum is not None for layer in config.layers)
    assert config.final_norm is None
    assert config.embedding.in_features == 32
    assert config.project_in is not None


def test_llama_biases_and_head_dim(tiny_model_dir: TinyModelDir) -> None:
    config = read(tiny_model_dir("llama", attention_bias=True, mlp_bias=True, head_dim=32))
    for layer in config.layers:
        assert all(matrix.has_bias for matrix in layer.matrices)
        assert layer.attention.head_dim == 32


def test_qwen_windows_start_at_max_window_layers(tiny_model_dir: TinyModelDir) -> None:
    options = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3}
    folder = tiny_model_dir("qwen2", **options)
    assert windows_of(read(folder)) == [None, 8, 8]
    older = json.loads((folder / "config.json").read_text())
    del older["layer_types"]
    assert windows_of(read_hf_config(older, source="c")) == [None, 8, 8]


GGUF_EXPERTS = {"llama__expert_count": 8, "llama__expert_used_count": 2}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def llama(**changes: Any) -> ModelConfig:
    return read_hf_config({**LLAMA, **changes}, source="some/config.json")


def test_keys_of_transformers_4() -> None:
    config = llama(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}, torch_dtype="bfloat16")
    assert rope_of(config) == RopeConfig(theta=5e5, scaling="linear", factor=2.0)
    assert config.dtype == "bfloat16"


def test_end_tokens_of_both_files_are_merged() -> None:
    config = read_hf_config(
        {**LLAMA, "eos_token_id": [7, 8]}, source="config.json", generation_config={"eos_token_id": [8, 9]}
    )
    assert config.eos_token_ids == (7, 8, 9)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["architectures", "MambaForCausalLM", "docs/models.md"]),
        ({"architectures": None}, ["architectures", "missing"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"hidden_size": True}, ["hidden_size", "True"]),
        ({"hidden_size": -64}, ["hidden_size", "-64"]),
        ({"hidden_size": 1 << 40}, ["hidden_size", str(1 << 40)]),
        ({"hidden_size": 66}, ["hidden_size", "66", "num_attention_heads"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads", "num_key_value_heads"]),
        ({"head_dim": 15}, ["head_dim", "even", "15"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps", "0"]),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, ["rope_scaling.rope_type", "ntk", "llama3", "yarn"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["rope_scaling.factor", "missing"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor", "missing"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "object"]),
        ({"rope_theta": -1.0}, ["rope_theta", "-1.0"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["torch_dtype", "float8_e4m3fn", "bfloat16"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "GGUF"]),
    ],
)
def test_errors_name_file_key_and_value(changes: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ModelLoadError) as caught:
        llama(**changes)
    for name in ["some/config.json", *names]:
        assert name in str(caught.value)


GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "general.file_type": 0,
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 256,
    "llama.rope.freq_base": 5e5,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 5,
}


def gguf(tensor_names: tuple[str, ...] = (), rope_freqs: list[float] | None = None, **changes: Any) -> ModelConfig:
    metadata = {**GGUF, **{key.replace("__", "."): value for key, value in changes.items()}}
    factors = None if rope_freqs is None else {"rope_freqs.weight": rope_freqs}
    return read_gguf_config(metadata, source="m.gguf", tensor_names=tensor_names, rope_factors=factors)


def test_gguf_metadata() -> None:
    config = gguf()
    attention = config.layers[1].attention
    assert (config.hidden_size, config.layers[1].feed_forward.inner_size, config.num_layers) == (64, 96, 2)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 16)
    assert rope_of(config) == RopeConfig(theta=5e5)
    assert config.eos_token_ids == (2, 5)
    assert config.dtype == "float32"


def test_gguf_tensor_names_determine_biases_and_tied_embeddings() -> None:
    assert gguf(("token_embd.weight",)).tie_word_embeddings
    untied = gguf(("token_embd.weight", "output.weight", "blk.0.attn_q.bias", "blk.0.ffn_up.bias"))
    assert not untied.tie_word_embeddings
    layer = untied.layers[0]
    assert [matrix.has_bias for matrix in layer.matrices] == [True, False, True, True]


def test_names_of_config_json_have_no_effect_in_a_gguf_file() -> None:
    assert not gguf(("token_embd.weight", "output.weight"), llama__tie_word_embeddings=True).tie_word_embeddings
    with pytest.raises(ModelLoadError, match=r"llama\.layer_types is .*, and the llama architecture does not"):
        gguf(llama__layer_types=["sliding_attention"] * 2)


def gguf_of(arch: str, **changes: Any) -> ModelConfig:
    metadata = {key.replace("llama.", f"{arch}."): value for key, value in GGUF.items()}
    added = {f"{arch}.{key.replace('__', '.')}": value for key, value in changes.items()}
    return read_gguf_config({**metadata, "general.architecture": arch, **added}, source="m.gguf")


def test_hunyuan_with_one_expert_has_no_router() -> None:
    dense = gguf_of("hunyuan-dense")
    assert gguf_of("hunyuan-dense", expert_count=1, expert_used_count=1) == dense
    assert gguf_of("hunyuan-dense", expert_count=0) == dense
    with pytest.raises(
        ModelLoadError, match="expert_count is 2, which is not supported: models of this class have no router"
    ):
        gguf_of("hunyuan-dense", expert_count=2)
    folder = {**LLAMA, "architectures": ["HunYuanDenseV1ForCausalLM"]}
    one = read_hf_config({**folder, "num_experts": 1, "moe_topk": [1, 1], "num_experts_per_tok": 1}, source="c")
    assert one == read_hf_config(folder, source="c")


def test_cohere2_requires_a_window() -> None:
    with pytest.raises(ModelLoadError, match=r"cohere2\.attention\.sliding_window is missing or 0; layers with a rot"):
        gguf_of("cohere2", attention__layer_norm_epsilon=1e-5)


def test_gguf_rope_factors() -> None:
    rope = rope_of(gguf(rope_freqs=[1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]))
    assert rope is not None
    assert rope.scaling == "factors"
    assert rope.freq_factors == (1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0)
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight"):
        gguf(rope_freqs=[1.0])


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"general__architecture": "mamba"}, ["general.architecture", "mamba", "docs/models.md"]),
        ({"llama__block_count": None}, ["llama.block_count", "missing"]),
        ({"llama__expert_count": 8}, ["llama.expert_used_count", "missing"]),
        ({"llama__expert_count": 8, "llama__expert_used_count": 9}, ["llama.expert_used_count", "8", "9"]),
        ({"llama__expert_gating_func": 2, **GGUF_EXPERTS}, ["llama.expert_gating_func", "2"]),
        ({"llama__expert_weights_norm": False, **GGUF_EXPERTS}, ["llama.expert_weights_norm", "False"]),
        ({"llama__expert_shared_count": 1, **GGUF_EXPERTS}, ["llama.expert_shared_count", "1"]),
        ({"llama__rope__scaling__type": "longrope"}, ["llama.rope.scaling.type", "longrope", "linear", "yarn"]),
        ({"llama__attention__key_length": 15}, ["llama.attention.key_length", "even", "15"]),
        ({"llama__attention__head_count_kv": 3}, ["llama.attention.head_count (4)", "attention.head_count_kv (3)"]),
        ({"llama__rope__dimension_count": 8}, ["llama.rope.dimension_count", "8"]),
        ({"llama__attention__head_count_kv": [2, 1]}, ["llama.attention.head_count_kv", "[2, 1]"]),
        ({"llama__vocab_size": None}, ["llama.vocab_size", "missing"]),
    ],
)
def test_gguf_errors_name_file_key_and_value(changes: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ModelLoadError) as caught:
        gguf(**changes)
    for name in ["m.gguf", *names]:
        assert name in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
OPTIONAL_KEYS = ["head_dim", "rope_scaling", "rope_parameters", "rope_theta", "layer_types", "use_sliding_window"]


@given(key=st.sampled_from([*LLAMA, *OPTIONAL_KEYS, "eos_token_id", "dtype", "quantization_config"]), value=JSON)
@example(key="layer_types", value=[[], {}])
def test_any_value_is_read_or_rejected(key: str, value: Any) -> None:
    base = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8}
    with suppress(ModelLoadError):
        assert isinstance(read_hf_config({**base, "max_window_layers": 1, key: value}, source="c"), ModelConfig)


@given(key=st.sampled_from([*GGUF, "llama.attention.key_length", "llama.rope.scaling.type"]), value=JSON)
@example(key="general.file_type", value=[1])
def test_any_gguf_value_is_read_or_rejected(key: str, value: Any) -> None:
    with suppress(ModelLoadError):
        assert isinstance(read_gguf_config({**GGUF, key: value}, source="m"), ModelConfig)


def test_gguf_counts_repeated_for_each_layer() -> None:
    config = gguf(llama__attention__head_count_kv=[2, 2], llama__feed_forward_length=[96, 96])
    layer = config.layers[0]
    assert (layer.attention.num_kv_heads, layer.feed_forward.inner_size) == (2, 96)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.2}}, "rope_scaling.mscale is 1.2"),
        ({"rope_scaling": {"rope_type": "linear", "type": "llama3", "factor": 2.0}}, "rope_scaling.type is 'llama3'"),
        ({"sliding_window": 64}, "sliding_window is 64"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
    ],
)
def test_errors_name_undeclared_properties(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(name)):
        llama(**changes)


def test_the_base_in_rope_parameters_precedes_the_other_one_as_in_transformers() -> None:
    for key in ("rope_parameters", "rope_scaling"):
        config = llama(rope_theta=5e5, **{key: {"rope_type": "default", "rope_theta": 300.0}})
        assert {spec.rope for spec in config.attention_specs.values()} == {RopeConfig(theta=300.0)}


def test_options_that_a_model_type_does_not_have_are_rejected() -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert read_hf_config({**mistral, "attention_bias": False, "mlp_bias": False}, source="c").name == "mistral"
    for key in ("attention_bias", "mlp_bias"):
        with pytest.raises(ModelLoadError, match=f"{key} is True"):
            read_hf_config({**mistral, key: True}, source="c")
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(ModelLoadError, match="layer_types must hold 2 of full_attention"):
        read_hf_config({**qwen, "use_sliding_window": False, "sliding_window": 8}, source="c")


def test_fine_tuned_checkpoints_load() -> None:
    """Training scripts, mergers and converters add such properties to `config.json`."""
    left = {
        "_name_or_path": "base",
        "transformers_version": "4.52.0",
        "unsloth_version": "2025.3",
        "model_type": "llama",
        "use_cache": False,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "pad_token_id": 3,
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"dtype": "q4"},
        "temperature": 0.7,
        "id2label": {"0": "LABEL_0"},
        "attn_logit_softcapping": None,
    }
    assert llama(**left) == llama()


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"llama__attn_logit_softcapping": 50.0}, "llama.attn_logit_softcapping is 50.0"),
        ({"llama__rope__scaling__attn_factor": 1.5}, "llama.rope.scaling.attn_factor is 1.5"),
        ({"llama__expert_used_count": 2}, "llama.expert_used_count is 2"),
    ],
)
def test_errors_name_undeclared_gguf_metadata(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(f"m.gguf: {name}")):
        gguf(**changes)
    assert gguf(llama__tensor_data_layout="Meta AI original pth", general__license="mit", quantize__imatrix__file="x")
