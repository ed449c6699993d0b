"""Random weights are reproducible by name and have the documented distribution."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chairlift.models.architectures.opt import OPTSizes
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.random_weights import RandomWeights
from chairlift.models.reading.llama_sizes import LlamaSizes

CONFIG = LlamaSizes(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    qk_norm="heads",
).declare()
OPT = OPTSizes(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    max_position_embeddings=64,
).declare()


def source(seed: int = 0, dtype: torch.dtype = torch.float32, config: ModelConfig = CONFIG) -> RandomWeights:
    return RandomWeights(config, dtype, torch.device("cpu"), seed)


def test_values_depend_on_name_and_seed_but_not_on_order() -> None:
    names = ["a.weight", "b.weight", "c.weight"]
    forward = {name: weights.tensor(name, (8, 8)) for weights in [source()] for name in names}
    backward = {name: weights.tensor(name, (8, 8)) for weights in [source()] for name in reversed(names)}
    assert all(torch.equal(forward[name], backward[name]) for name in names)
    assert not torch.equal(forward["a.weight"], forward["b.weight"])
    assert not torch.equal(forward["a.weight"], source(1).tensor("a.weight", (8, 8)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_standard_deviation(dtype: torch.dtype) -> None:
    weight = source(dtype=dtype).tensor("model.layers.0.mlp.up_proj.weight", (400, 300))
    assert weight.dtype == dtype
    assert weight.float().mean().abs() < 2e-4
    assert abs(weight.float().std() - 0.02) < 2e-4


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.decoder.layers.0.self_attn_layer_norm.weight",
        "model.decoder.final_layer_norm.weight",
    ],
)
def test_norms_are_one(name: str) -> None:
    weights = source(config=OPT if "decoder" in name else CONFIG)
    assert torch.equal(weights.tensor(name, (64,)), torch.ones(64))


def test_scales_of_layers_are_one() -> None:
    config = replace(CONFIG, layers=(replace(CONFIG.layers[0], output_scale="model.layers.0.layer_scalar"),))
    assert source(config=config).tensor("model.layers.0.layer_scalar", (1,)) == 1


def test_biases_are_zero() -> None:
    assert torch.equal(source().tensor("model.layers.0.self_attn.q_proj.bias", (64,)), torch.zeros(64))
    assert torch.equal(source().tensor("model.decoder.final_layer_norm.bias", (64,)), torch.zeros(64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_packed_rows_have_the_type_of_the_file(dtype: str) -> None:
    weights = RandomWeights(replace(CONFIG, dtype=dtype), torch.float32, torch.device("cpu"))
    tensor, packed = weights.tensor("a.weight", (8, 6)), weights.packed("a.weight", (8, 6))
    assert packed.format == {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
    assert torch.equal(torch.from_numpy(packed.to_floats(packed.rows[2:5])), tensor[2:5])
    assert tensor.dtype == torch.float32
