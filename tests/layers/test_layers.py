"""Layers with named weights equal transformers and plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from chairlift.errors import ModelLoadError
from chairlift.kernels.interface import Kernels
from chairlift.kernels.registry import PORTABLE_KERNELS
from chairlift.layers.embedding import Embedding, LMHead
from chairlift.layers.linear import Linear
from chairlift.layers.norm import layer_norm, rms_norm
from chairlift.models.declaration import RopeConfig
from chairlift.models.decoder import make_rotary

CPU = torch.device("cpu")


class Parameters:
    """A `Weights` with random parameters, each drawn on first use and then kept."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.made: dict[str, torch.Tensor] = {}
        self._dtype = dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        made = self.made.setdefault(name, torch.randn(shape, dtype=self._dtype))
        assert made.shape == shape
        return made

    def has(self, name: str) -> bool:
        return True


@pytest.fixture(params=sorted(PORTABLE_KERNELS))
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return PORTABLE_KERNELS[request.param]


@pytest.mark.parametrize("bias", [True, False])
def test_a_fused_linear_is_the_concatenation_of_its_parts(kernels: Kernels, bias: bool) -> None:
    weights, x = Parameters(), torch.randn(3, 6)
    fused = Linear(kernels, weights, [("q", 8), ("k", 4), ("v", 4)], 6, bias=bias)
    made = weights.made
    parts = [F.linear(x, made[f"{name}.weight"], made.get(f"{name}.bias")) for name in "qkv"]
    torch.testing.assert_close(fused(x), torch.cat(parts, dim=-1), rtol=1e-5, atol=1e-5)
    assert len(made) == (6 if bias else 3)
    residual = torch.randn(3, 16)
    torch.testing.assert_close(fused(x, residual.clone()), residual + fused(x))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_float32_for_weights_of_any_type(kernels: Kernels, tied: bool, dtype: torch.dtype) -> None:
    weights, hidden = Parameters(dtype), torch.randn(2, 6, dtype=dtype)
    embedding = Embedding(kernels, weights, "embed_tokens", 10, 6)
    head = LMHead(kernels, weights, "lm_head", 10, 6, tied_to=embedding if tied else None)
    logits = head(hidden)
    assert logits.dtype == torch.float32
    table = weights.made["embed_tokens.weight" if tied else "lm_head.weight"]
    torch.testing.assert_close(logits, F.linear(hidden, table).float(), rtol=2e-2, atol=2e-2)
    assert ("lm_head.weight" in weights.made) is not tied
    assert torch.equal(embedding(torch.tensor([3, 9])), weights.made["embed_tokens.weight"][[3, 9]])


def test_norms_are_prologues_of_products(kernels: Kernels) -> None:
    weights, x = Parameters(), torch.randn(3, 6)
    rms, layer = rms_norm(weights, "rms", 6, 0.1), layer_norm(weights, "layer", 6, 0.1)
    made = weights.made
    expected = F.rms_norm(x, (6,), made["rms.weight"], 0.1)
    torch.testing.assert_close(kernels.make_prologue(rms)(x), expected)
    product = Linear(kernels, weights, [("o", 4)], 6, prologue=rms)(x)
    torch.testing.assert_close(product, F.linear(expected, made["o.weight"]), rtol=1e-5, atol=1e-5)
    head = LMHead(kernels, weights, "lm_head", 10, 6, tied_to=None, prologue=layer)
    expected = F.layer_norm(x, (6,), made["layer.weight"], made["layer.bias"], 0.1)
    torch.testing.assert_close(head(x), F.linear(expected, made["lm_head.weight"]), rtol=1e-5, atol=1e-5)


LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(("scaling", "parameters"), [("none", {}), ("linear", {"factor": 4.0}), ("llama3", LLAMA3)])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_rotary_tables_equal_those_of_transformers(scaling: str, parameters: dict[str, Any], head_dim: int) -> None:
    rope_type = {"none": "default"}.get(scaling, scaling)
    config = LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": rope_type, "rope_theta": 5e4, **parameters},
    )
    positions = torch.tensor([0, 1, 130, 1023])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    rotary = make_rotary(RopeConfig(theta=5e4, scaling=scaling, **parameters), head_dim, 1024, CPU)
    expected = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
    torch.testing.assert_close(rotary.cos_sin_cache[positions], expected, rtol=0, atol=2e-5)


def test_frequency_factors_divide_the_frequencies() -> None:
    factors = (1.0, 1.0, 2.0, 8.0)
    rotary = make_rotary(RopeConfig(theta=100.0, scaling="factors", freq_factors=factors), 8, 4, CPU)
    angles = [3 * 100.0 ** (-2 * i / 8) / factor for i, factor in enumerate(factors)]
    torch.testing.assert_close(rotary.cos_sin_cache[3, :4], torch.tensor(angles).cos())
    torch.testing.assert_close(rotary.cos_sin_cache[3, 4:], torch.tensor(angles).sin())


def test_an_unknown_scaling_is_rejected() -> None:
    with pytest.raises(ModelLoadError, match="rope scaling must be none, linear, llama3 or factors; got 'yarn'"):
        make_rotary(RopeConfig(scaling="yarn"), 8, 4, CPU)
