"""build_model builds every architecture and rejects unsupported models; random weights are reproducible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from chairlift.errors import ChairliftError, ModelLoadError
from chairlift.loading.model_source import FolderSource
from chairlift.loading.safetensors_weights import SafetensorsWeights
from chairlift.models.architectures.opt import OPTSizes
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.decoder import DecoderModel, build_model
from chairlift.models.random_weights import RandomWeights
from chairlift.models.reading.llama_sizes import LlamaSizes
from chairlift.models.registry import ARCHITECTURES

CPU = torch.device("cpu")
LLAMA = LlamaSizes(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=64,
)
OPT = OPTSizes(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, max_position_embeddings=64
)


def build(config: ModelConfig, kernels: str = "torch") -> DecoderModel:
    weights = RandomWeights(config, torch.float32, CPU)
    return build_model(config, weights, dtype=torch.float32, device="cpu", kernels=kernels)


def test_every_architecture_builds() -> None:
    encoders = {"bert", "modernbert", "static"}  # have models of their own, see tests/engine/test_embeddings.py
    names = sorted(set(ARCHITECTURES) - encoders - {OPT.declare().architecture})
    configs = OPT.declare(), *(replace(LLAMA.declare(), architecture=name, name=name) for name in names)
    for config in configs:
        model = build(config)
        assert len(model.attention_layers) == 2
        assert model.config is config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            replace(LLAMA.declare(), architecture="mamba", name="mamba2"),
            f"architecture must be one of {', '.join(sorted(ARCHITECTURES))}; got 'mamba'",
        ),
        (
            replace(LLAMA, activation="mish").declare(),
            r"activation must be one of gelu, gelu_tanh, relu, relu2, silu, swigluoai, xielu; got 'mish' \(llama\)",
        ),
        (
            replace(OPT, activation="mish").declare(),
            "activation must be one of gelu, gelu_tanh, relu, relu2, silu, swigluoai, xielu; got 'mish'",
        ),
    ],
)
def test_unsupported_models_are_rejected(config: ModelConfig, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        build(config)


def test_unknown_kernel_set_is_rejected() -> None:
    with pytest.raises(ChairliftError, match="kernels must be one of"):
        build(LLAMA.declare(), "flash")


@pytest.mark.parametrize("root", ["model.decoder.", "decoder."])
def test_opt_names_with_and_without_prefix(tmp_path: Path, root: str) -> None:
    """Some OPT files use the prefix `decoder.` for their parameters."""
    config = OPT.declare()
    whole = RandomWeights(config, torch.float32, CPU)
    tensors = {
        root + name.removeprefix("model.decoder."): whole.tensor(name, shape) for name, shape in parameters(config)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    weights = SafetensorsWeights(tmp_path, config, torch.float32, CPU)
    build_model(config, weights, dtype=torch.float32, device="cpu")
    assert weights.unused() == []
    formats = FolderSource(tmp_path, "opt").formats(replace(config, dtype="float16"))
    assert formats("model.decoder.embed_tokens.weight") == "f32"


def parameters(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    for matrix in config.matrices:
        for name, out in matrix.parts:
            yield f"{name}.weight", (out, matrix.in_features)
            if matrix.has_bias:
                yield f"{name}.bias", (out,)
    norms = [norm for layer in config.layers for norm in layer.norms]
    assert config.final_norm is not None
    for norm in (*norms, config.final_norm):
        yield f"{norm.name}.weight", (norm.size,)
        yield f"{norm.name}.bias", (norm.size,)
    assert config.positions is not None
    yield f"{config.positions.name}.weight", (config.positions.rows, config.positions.size)


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
RANDOM_OPT = OPTSizes(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_layers=1, num_heads=4, max_position_embeddings=64
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
    weights = source(config=RANDOM_OPT if "decoder" in name else CONFIG)
    assert torch.equal(weights.tensor(name, (64,)), torch.ones(64))


def test_scales_are_one_and_biases_zero() -> None:
    config = replace(CONFIG, layers=(replace(CONFIG.layers[0], output_scale="model.layers.0.layer_scalar"),))
    assert source(config=config).tensor("model.layers.0.layer_scalar", (1,)) == 1
    assert torch.equal(source().tensor("model.layers.0.self_attn.q_proj.bias", (64,)), torch.zeros(64))
    assert torch.equal(source().tensor("model.decoder.final_layer_norm.bias", (64,)), torch.zeros(64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_packed_rows_have_the_type_of_the_file(dtype: str) -> None:
    weights = RandomWeights(replace(CONFIG, dtype=dtype), torch.float32, torch.device("cpu"))
    tensor, packed = weights.tensor("a.weight", (8, 6)), weights.packed("a.weight", (8, 6))
    assert packed.format == {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
    assert torch.equal(torch.from_numpy(packed.to_floats(packed.rows[2:5])), tensor[2:5])
    assert tensor.dtype == torch.float32
