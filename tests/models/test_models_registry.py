"""What build_model accepts and refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chairlift.errors import ChairliftError, ModelLoadError
from chairlift.loading.random_weights import RandomWeights
from chairlift.models.config import ModelConfig, RopeConfig
from chairlift.models.model import Model
from chairlift.models.registry import SUPPORTED, build_model

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    architecture="llama",
    name="llama",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    norm_eps=1e-5,
    sliding_windows=(None, None),
    rope=RopeConfig(),
)
OPT = replace(CONFIG, architecture="opt", name="opt", num_kv_heads=4, activation="relu", rope=None)


class WithoutPrefix(RandomWeights):
    """Some OPT files call their parameters `decoder...`."""

    def __init__(self) -> None:
        super().__init__(OPT, torch.float32, CPU)
        self.asked: list[str] = []

    def has(self, name: str) -> bool:
        return not name.startswith("model.")

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.asked.append(name)
        return super().tensor(name, shape)


def build(config: ModelConfig, kernels: str = "torch") -> Model:
    weights = RandomWeights(config, torch.float32, CPU)
    return build_model(config, weights, dtype=torch.float32, device="cpu", kernels=kernels)


def test_every_architecture_builds() -> None:
    assert {config.architecture for config in (CONFIG, OPT)} == set(SUPPORTED)
    for config in (CONFIG, OPT):
        model = build(config)
        assert len(model.attention_layers) == 2
        assert model.config is config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(CONFIG, architecture="mamba", name="mamba2"), "architecture must be one of llama, opt, got 'mamba'"),
        (replace(CONFIG, rope=None), "needs rotary embedding"),
        (replace(CONFIG, activation="gelu"), "activation must be silu"),
        (replace(OPT, activation="gelu"), "activation must be relu"),
    ],
)
def test_what_cannot_be_run_is_refused(config: ModelConfig, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        build(config)


def test_unknown_kernels_are_rejected() -> None:
    with pytest.raises(ChairliftError, match="kernels must be one of"):
        build(CONFIG, "flash")


def test_opt_names_with_and_without_prefix() -> None:
    weights = WithoutPrefix()
    build_model(OPT, weights, dtype=torch.float32, device="cpu")
    assert {name.split(".")[0] for name in weights.asked} == {"decoder", "lm_head"}
