"""`quantization_config`: the schemes of its methods, the modules that they apply to, and errors for everything else."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from test_model_config import LLAMA

from chairlift.errors import ModelLoadError
from chairlift.models.quantization import Quantization, WeightScheme
from chairlift.models.registry import read_hf_config
from support.case_loop import loop_over

Q_PROJ = "model.layers.0.self_attn.q_proj"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(weights: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**INT8, **(weights or {})}, "input_activations": TOKENS}
    groups = {"group_0": {**group, **options.pop("group", {})}}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
        **options,
    }


def read(config: dict[str, Any]) -> Quantization:
    found = read_hf_config({**LLAMA, "quantization_config": config}, source="some/config.json").quantization
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (AWQ, WeightScheme("awq", 4, group_size=128, symmetric=False)),
        ({**AWQ, "version": "GEMM", "group_size": -1}, WeightScheme("awq", 4, symmetric=False)),
        (GPTQ, WeightScheme("gptq", 4, group_size=128, zero_point_offset=1)),
        (
            {**GPTQ, "bits": 8, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2", "group_size": 32},
            WeightScheme("gptq", 8, group_size=32, symmetric=False, act_order=True),
        ),
        ({**GPTQ, "desc_act": True, "group_size": -1}, WeightScheme("gptq", 4, zero_point_offset=1)),
        ({**AWQ, "zero_point": False}, WeightScheme("awq", 4, group_size=128)),
        (AUTO_ROUND, WeightScheme("gptq", 4, group_size=128, zero_point_offset=1)),
        ({**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, WeightScheme("awq", 4, group_size=128)),
        (
            {**AUTO_ROUND, "packing_format": "auto_round:auto_awq", "sym": False},
            WeightScheme("awq", 4, group_size=128, symmetric=False),
        ),
        (
            {**AUTO_ROUND, "packing_format": "auto_round", "sym": False},
            WeightScheme("gptq", 4, group_size=128, symmetric=False),
        ),
        (FP8, WeightScheme("fp8", 8, is_float=True, group_size=128, block_rows=128)),
        ({**FP8, "weight_block_size": None, "activation_scheme": "static"}, WeightScheme("fp8", 8, is_float=True)),
        (
            {**FP8, "weight_block_size": None, "weight_scale_semantics": "inverse"},
            WeightScheme("fp8", 8, is_float=True, divides=True),
        ),
        (compressed(NVFP4), WeightScheme("compressed-tensors", 4, is_float=True, group_size=16)),
        (
            compressed({**NVFP4, "strategy": "group", "group_size": 32}),
            WeightScheme("compressed-tensors", 4, is_float=True, group_size=32),
        ),
        ({**FP8, "weight_block_size": None}, WeightScheme("fp8", 8, is_float=True)),
        (
            {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
            WeightScheme("mxfp4", 4, is_float=True, group_size=32),
        ),
        (compressed(), WeightScheme("compressed-tensors", 8)),
        (
            compressed({"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False, "actorder": "group"}),
            WeightScheme("compressed-tensors", 4, group_size=64, symmetric=False, act_order=True),
        ),
        (
            compressed({"type": "float", "strategy": "block", "block_structure": [128, 128]}),
            WeightScheme("compressed-tensors", 8, is_float=True, group_size=128, block_rows=128),
        ),
    ],
)
def test_schemes(config: dict[str, Any], scheme: WeightScheme) -> None:
    found = read(config)
    assert found.method == scheme.method
    assert found.scheme(Q_PROJ) == scheme


def test_targets_and_ignored_modules() -> None:
    config = compressed(ignore=["lm_head", r"re:.*\.down_proj$"])
    config["config_groups"]["group_1"] = {"targets": ["re:.*o_proj", Q_PROJ], "weights": {**INT8, "num_bits": 4}}
    found = read(config)
    bits = {name: found.scheme(f"model.layers.0.{name}") for name in ("self_attn.q_proj", "self_attn.o_proj")}
    assert {name: scheme and scheme.bits for name, scheme in bits.items()} == {
        "self_attn.q_proj": 4,
        "self_attn.o_proj": 4,
    }
    assert found.scheme("model.layers.1.self_attn.q_proj") == WeightScheme("compressed-tensors", 8)
    assert found.scheme("lm_head") is None
    assert found.scheme("model.layers.3.mlp.down_proj") is None


def test_modules_with_values_of_their_own() -> None:
    """GPTQModel writes patterns for the beginning of a name, AutoRound names and patterns for any part of it."""
    down, up = "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj"
    dynamic = {"-:.*o_proj": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 32}, ".*up_proj": {"desc_act": True}}
    for key, modules in (
        ("dynamic", dynamic),
        ("extra_config", {down: {"bits": 8, "group_size": 32}, r"up_p.*j": {"sym": False}, "lm_head": {"bits": 16}}),
    ):
        found = read({**GPTQ, key: modules})
        base = WeightScheme("gptq", 4, group_size=128, zero_point_offset=1)
        assert found.scheme(Q_PROJ) == base
        assert found.scheme(down) == replace(base, bits=8, group_size=32)
        assert found.scheme(up) == replace(base, act_order=key == "dynamic", symmetric=key == "dynamic")


WRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GPTQModel 7.7": (
        {
            **GPTQ,
            "method": "gptq",
            "format": "gptq",
            "checkpoint_format": "gptq",
            "pack_dtype": "int32",
            "lm_head": False,
        },
        {"meta": {"quantizer": ["gptqmodel:7.7.0"], "act_group_aware": True}},
    ),
    "AWQ of GPTQModel 7.7": (
        {
            **AWQ,
            "method": "awq",
            "format": "gemm",
            "checkpoint_format": "gemm",
            "pack_dtype": "int32",
            "desc_act": False,
        },
        {"meta": {"fallback": {"threshold": "0.5%"}}},
    ),
    "GPTQConfig of transformers 5.23": (
        {**GPTQ, "format": "gptq", "tokenizer": None, "dataset": None, "modules_in_block_to_quantize": None},
        {"act_group_aware": True, "backend": "auto", "batch_size": 1, "true_sequential": True, "damp_percent": 0.1},
    ),
    "AwqConfig of transformers 5.23": (
        {**AWQ, "format": "gemm", "sym": True, "desc_act": False, "modules_to_not_convert": None},
        {"act_group_aware": True, "cache_block_outputs": True},
    ),
    "FineGrainedFP8Config of transformers 5.23": (
        {**FP8, "dequantize": False, "expert_dtype": "fp8", "modules_to_not_convert": ["lm_head"]},
        {"scale_fmt": "float", "modules_to_convert": ["model.embed_tokens"]},
    ),
    "AutoRound 0.16": (
        {**AUTO_ROUND, "data_type": "int", "packing_format": "auto_round:auto_gptq", "amp": False},
        {"autoround_version": "0.16.1", "block_name_to_quantize": "model.layers", "iters": 200, "seqlen": 2048},
    ),
    "AWQ of AutoRound 0.16": (
        {**AWQ, "data_type": "int", "sym": True, "zero_point": False},
        {"autoround_version": "0.16.1", "provider": "auto-round", "to_quant_block_names": "model.layers"},
    ),
    "FP8 of GPTQModel 7.7": (
        {**FP8, "bits": 8, "format": "float8_e4m3fn", "checkpoint_format": "float8_e4m3fn", "group_size": -1},
        {"meta": {"quantizer": ["gptqmodel:7.7.0"]}},
    ),
    "FP8 of AutoRound 0.16": (
        {
            **{"quant_method": "auto-round", "packing_format": "auto_round:fp8_static", "bits": 8, "group_size": -1},
            **{"data_type": "fp", "fmt": "e4m3", "activation_scheme": "static", "sym": True},
        },
        {"act_bits": 8, "act_data_type": "fp", "act_sym": True, "autoround_version": "0.16.1"},
    ),
    "blocks of FP8 of AutoRound 0.16": (
        {**FP8, **{"quant_method": "auto-round", "packing_format": "auto_round:fp8", "group_size": [128, 128]}},
        {"act_bits": 8, "act_dynamic": True, "act_group_size": 128},
    ),
    "MXFP4 of AutoRound 0.16": (
        {**AUTO_ROUND, "packing_format": "auto_round:llm_compressor", "data_type": "mx_fp", "group_size": 32},
        {"act_bits": 4, "act_data_type": "mx_fp"},
    ),
    "AutoFP8": ({**FP8, "activation_scheme": "static", "ignored_layers": ["lm_head"]}, {"kv_cache_scheme": "static"}),
    "compressed-tensors 0.20": (
        compressed(NVFP4, group={"format": "nvfp4-pack-quantized"}, moe_sparsity_config=None, format="mixed-precision"),
        {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}, "quantization_status": "compressed"},
    ),
    "another program": (GPTQ, {"surprise": 1}),
}
"""Configurations by the program that writes them: fields that are read, and fields that do not change the weights."""


@loop_over("name", WRITTEN)
def test_fields_that_do_not_change_the_weights_are_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config, neutral = WRITTEN[name]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert read({**config, **neutral}) == read(config)
    (line, *_) = [record.message for record in caplog.records if "do not change the weights" in record.message]
    names = line.partition("do not change the weights: ")[2].split(", ")
    expected = {*neutral, *(("config_groups.group_0.input_activations",) if "config_groups" in config else ())}
    assert set(names) == expected, line


def test_activations_and_caches_of_compressed_tensors_need_not_be_quantized() -> None:
    local = {**TOKENS, "num_bits": 4, "dynamic": "local"}
    for group in (
        {"input_activations": {**TOKENS, "dynamic": False}, "output_activations": TOKENS},
        {"input_activations": local},
    ):
        assert read(compressed(group=group)).scheme(Q_PROJ) == WeightScheme("compressed-tensors", 8)
    config = compressed()
    config["config_groups"]["group_1"] = {"targets": ["re:.*k_proj"], "output_activations": TOKENS}
    assert read(config).scheme("model.layers.0.self_attn.k_proj") == WeightScheme("compressed-tensors", 8)


@pytest.mark.parametrize(
    ("scheme", "in_features", "expected"),
    [
        (WeightScheme("x", 8), 100, "int8"),
        (WeightScheme("x", 8, group_size=128), 256, "q8_0"),
        (WeightScheme("x", 8, symmetric=False), 256, "u8_g32"),
        (WeightScheme("x", 4, group_size=128), 256, "q4_0"),
        (WeightScheme("x", 4), 256, "u4_g128"),
        (WeightScheme("x", 4), 96, "q4_0"),
        (WeightScheme("x", 4, group_size=128, symmetric=False), 256, "u4_g128"),
        (WeightScheme("x", 4, group_size=64, symmetric=False), 256, "u4_g32"),
        (WeightScheme("x", 4, group_size=32, act_order=True), 256, "q4_0+order"),
        (WeightScheme("x", 8, is_float=True), 100, "f8_e4m3"),
        (WeightScheme("x", 4, is_float=True, group_size=16), 64, "nvfp4"),
        (WeightScheme("x", 4, is_float=True, group_size=32), 64, "mxfp4"),
    ],
)
def test_formats_of_the_kernels(scheme: WeightScheme, in_features: int, expected: str) -> None:
    assert scheme.packed_format(in_features) == expected


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["quant_method", "bitsandbytes", "awq, compressed-t"]),
        ({"bits": 4}, ["quant_method", "none", "gptq"]),
        ("awq", ["quantization_config", "object", "'awq'"]),
        ({**AWQ, "bits": 3}, ["bits", "3", "awq checkpoints", "supported: 4"]),
        ({**AWQ, "version": "marlin"}, ["version", "marlin", "gemm"]),
        ({**AWQ, "desc_act": True}, ["desc_act", "True"]),
        ({**AWQ, "group_size": 16}, ["group_size", "16", "multiples of 32"]),
        ({**AWQ, "surprising_scales": 1}, ["surprising_scales", "awq format does not declare"]),
        ({**AWQ, "checkpoint_format": "gemv"}, ["checkpoint_format", "gemv", "gemm"]),
        ({**GPTQ, "bits": 2}, ["bits", "2", "gptq checkpoints", "4, 8"]),
        ({**GPTQ, "checkpoint_format": "marlin"}, ["checkpoint_format", "marlin", "gptq_v2"]),
        ({**GPTQ, "is_marlin_format": True}, ["is_marlin_format"]),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 3}}}, ["dynamic.+:.*down.*.bits", "3"]),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"rotation": "x"}}}, ["dynamic.+:.*down.*.rotation", "does not declare"]),
        ({**GPTQ, "dynamic": {"+:(": {"bits": 8}}}, ["dynamic", "re:(", "regular expression"]),
        ({**GPTQ, "method": "qqq"}, ["method", "qqq", "quant_method (gptq)"]),
        ({**GPTQ, "pack_dtype": "int16"}, ["pack_dtype", "int16", "int32"]),
        ({**GPTQ, "rotation": "hadamard"}, ["rotation", "hadamard", "gptq format does not declare"]),
        ({**GPTQ, "data_type": "nv_fp"}, ["data_type", "nv_fp"]),
        ({**GPTQ, "extra_config": {"lm_head": {"data_type": "mx_fp"}}}, ["extra_config.lm_head.data_type", "mx_fp"]),
        (
            {**AUTO_ROUND, "packing_format": "auto_round:mlx"},
            ["packing_format", "auto_round:mlx", "auto_round:auto_awq"],
        ),
        ({**AUTO_ROUND, "rotation_configs": [{"type": "quarot"}]}, ["rotation_configs", "does not declare"]),
        ({**FP8, "activation_scheme": "none"}, ["activation_scheme", "none", "dynamic, static"]),
        ({**AUTO_ROUND, "packing_format": "auto_round:llm_compressor"}, ["data_type", "int", "nv_fp, mx_fp"]),
        ({**FP8, "group_size": 64}, ["group_size", "64", "weight_block_size"]),
        ({**FP8, "extra_config": {"lm_head": {"bits": 4}}}, ["extra_config.lm_head.bits", "4"]),
        ({**FP8, "expert_dtype": "fp4"}, ["expert_dtype", "fp4"]),
        ({**FP8, "dequantize": True}, ["dequantize", "True"]),
        ({**FP8, "weight_scale_semantics": "direct"}, ["weight_scale_semantics", "direct"]),
        ({**FP8, "weight_block_size": [128, 64]}, ["weight_block_size", "[128, 64]", "[n, 128]"]),
        ({**FP8, "fmt": "e5m2"}, ["fmt", "e5m2", "E4M3"]),
        (compressed({"num_bits": 3}), ["group_0.weights.num_bits", "3", "4, 8", "compressed-tensors"]),
        (
            compressed({"type": "float", "num_bits": 4}),
            ["weights.strategy", "channel", "supported: tensor_group, group"],
        ),
        (compressed({**NVFP4, "group_size": 32}), ["weights.group_size", "32", "supported: 16"]),
        (compressed({**NVFP4, "symmetric": False}), ["weights.symmetric", "False"]),
        (compressed({"strategy": "tensor_group"}), ["weights.strategy", "tensor_group", "group"]),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), ["sparsity_config", "sparse-24", "dense"]),
        (compressed(transform_config={"config_groups": {"R1": {}}}), ["transform_config", "R1"]),
        (compressed(format="marlin-24"), ["format", "marlin-24", "pack-quantized"]),
        (compressed(config_groups={}), ["config_groups", "targets"]),
        (compressed(ignore=["re:("]), ["ignore", "re:(", "regular expression"]),
    ],
)
def test_errors_name_the_method_the_value_and_the_alternative(config: Any, names: list[str]) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(config)
    for name in ["some/config.json", "quantization_config", *names]:
        assert name in str(caught.value)


def test_errors_name_another_way() -> None:
    with pytest.raises(ModelLoadError, match=r"use a GGUF file, or the unquantized model with --quantization int8"):
        read({"quant_method": "bitsandbytes"})


def test_targets_may_have_the_names_of_another_version_of_transformers() -> None:
    """A name of a module has precedence over `Linear`, in whichever form the configuration has it."""
    own, others = WeightScheme("gptq", 8), WeightScheme("gptq", 4)
    found = Quantization("gptq", ((("re:model.language_model.layers.1.",), own), (("Linear",), others)))
    for layer, scheme in ((0, others), (1, own)):
        end = f"layers.{layer}.mlp.up_proj"
        assert (
            found.scheme(f"language_model.model.{end}", f"model.{end}.weight", f"model.language_model.{end}.weight")
            == scheme
        )
