"""build_model builds every architecture and rejects unsupported models."""

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
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    max_position_embeddings=64,
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
