"""`quantization_config`: the schemes of its methods, the modules that they apply to, and errors for everything else."""

from __future__ import annotations

from typing import Any

import pytest
from test_model_config import LLAMA

from chairlift.errors import ModelLoadError
from chairlift.models.quantization import Quantization, WeightScheme
from chairlift.models.registry import read_hf_config

Q_PROJ = "model.layers.0.self_attn.q_proj"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
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
        (FP8, WeightScheme("fp8", 8, is_float=True, group_size=128, block_rows=128)),
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
    assert found.method == config["quant_method"]
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
        ({**AWQ, "zero_point": False}, ["zero_point", "False"]),
        ({**AWQ, "group_size": 16}, ["group_size", "16", "multiples of 32"]),
        ({**AWQ, "surprise": 1}, ["surprise", "awq format does not declare"]),
        ({**GPTQ, "bits": 2}, ["bits", "2", "gptq checkpoints", "4, 8"]),
        ({**GPTQ, "checkpoint_format": "marlin"}, ["checkpoint_format", "marlin", "gptq_v2"]),
        ({**GPTQ, "is_marlin_format": True}, ["is_marlin_format"]),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, ["dynamic", "same bits"]),
        ({**FP8, "activation_scheme": "static"}, ["activation_scheme", "static", "dynamic"]),
        ({**FP8, "weight_block_size": [128, 64]}, ["weight_block_size", "[128, 64]", "[n, 128]"]),
        ({**FP8, "fmt": "e5m2"}, ["fmt", "e5m2", "E4M3"]),
        (compressed({"num_bits": 3}), ["group_0.weights.num_bits", "3", "4, 8", "compressed-tensors"]),
        (compressed({"type": "float", "num_bits": 4}), ["weights.num_bits", "4", "supported: 8"]),
        (compressed({"strategy": "tensor_group"}), ["weights.strategy", "tensor_group", "group"]),
        (compressed(group={"input_activations": {**TOKENS, "dynamic": False}}), ["input_activations.dynamic", "False"]),
        (compressed(group={"output_activations": TOKENS}), ["output_activations"]),
        (compressed(kv_cache_scheme={"num_bits": 8}), ["kv_cache_scheme", "--kv-cache-dtype"]),
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
