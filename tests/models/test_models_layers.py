"""Layers with named weights equal transformers and plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from chairlift.errors import ModelLoadError
from chairlift.kernels.interface import NO_PROLOGUE, Kernels, LinearKernel, Prologue
from chairlift.kernels.kernel_set import get_kernels
from chairlift.kernels.weights import PackedRows, packed_tensor
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.declaration.matrix_spec import ATTENTION, MLP, MatrixSpec, NormSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.decoder import build_model
from chairlift.models.layer_builder import LayerBuilder
from chairlift.models.reading.llama_sizes import LlamaSizes
from chairlift.models.rotary import EXTRA_POSITIONS, RotaryTable, rotary_table

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

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows:
        return packed_tensor(self.tensor(name, shape))


@pytest.fixture(params=["reference", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return get_kernels(request.param)


def tiny(tied: bool = False) -> ModelConfig:
    return LlamaSizes(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=4,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
    ).declare()


def linear(builder: LayerBuilder, name: str, out: int, prologue: Prologue = NO_PROLOGUE) -> LinearKernel:
    return builder.linear(MatrixSpec(MLP, name, ((name, out),), 6), prologue)


@pytest.mark.parametrize("bias", [True, False])
def test_a_fused_linear_is_the_concatenation_of_its_parts(kernels: Kernels, bias: bool) -> None:
    weights, x = Parameters(), torch.randn(3, 6)
    spec = MatrixSpec(ATTENTION, "qkv", (("q", 8), ("k", 4), ("v", 4)), 6, bias)
    fused = LayerBuilder(tiny(), weights, kernels, {}).linear(spec)
    made = weights.made
    parts = [F.linear(x, made[f"{name}.weight"], made.get(f"{name}.bias")) for name in "qkv"]
    torch.testing.assert_close(fused(x), torch.cat(parts, dim=-1), rtol=1e-5, atol=1e-5)
    assert len(made) == (6 if bias else 3)
    residual = torch.randn(3, 16)
    torch.testing.assert_close(fused(x, residual.clone()), residual + fused(x))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_float32_for_weights_of_any_type(kernels: Kernels, tied: bool, dtype: torch.dtype) -> None:
    weights, hidden = Parameters(dtype), torch.randn(2, 8, dtype=dtype)
    model = build_model(tiny(tied), weights, dtype=dtype, device=CPU, kernels=kernels.name)
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    embedding, made = weights.made["model.embed_tokens.weight"], weights.made
    normed = F.rms_norm(hidden, (8,), made["model.norm.weight"], 1e-5)
    expected = F.linear(normed, embedding if tied else made["lm_head.weight"]).float()
    torch.testing.assert_close(logits, expected, rtol=5e-2, atol=5e-2)
    assert ("lm_head.weight" in made) is not tied
    assert torch.equal(model.embedding(torch.tensor([3, 9])), embedding[[3, 9]])


def test_norms_are_prologues_of_products(kernels: Kernels) -> None:
    weights, x = Parameters(), torch.randn(3, 6)
    builder = LayerBuilder(tiny(), weights, kernels, {})
    rms = builder.norm(NormSpec("rms_norm", "rms", 6, 0.1))
    layer = builder.norm(NormSpec("layer_norm", "layer", 6, 0.1))
    made = weights.made
    expected = F.rms_norm(x, (6,), made["rms.weight"], 0.1)
    product = linear(builder, "o", 4, rms)(x)
    torch.testing.assert_close(product, F.linear(expected, made["o.weight"]), rtol=1e-5, atol=1e-5)
    product = linear(builder, "p", 10, layer)(x)
    expected = F.layer_norm(x, (6,), made["layer.weight"], made["layer.bias"], 0.1)
    torch.testing.assert_close(product, F.linear(expected, made["p.weight"]), rtol=1e-5, atol=1e-5)


def test_offsets_are_added_to_the_weights_of_norms(kernels: Kernels) -> None:
    weights = Parameters()
    builder = LayerBuilder(tiny(), weights, kernels, {})
    norm = builder.norm(NormSpec("rms_norm", "rms", 6, 0.1, weight_offset=1.0))
    assert norm.weight is not None
    assert torch.equal(norm.weight, weights.made["rms.weight"] + 1)


def test_rotary_tables_are_computed_as_far_as_sequences_reach() -> None:
    rope = RopeConfig(theta=100.0, scaling="linear", factor=2.0, attention_factor=1.5)
    whole, table = rotary_table(rope, 8, 5000, CPU), RotaryTable(rope, 8, 5000, CPU)
    address = table.values.data_ptr()
    assert not table.values.any()
    for num_positions in (1, 900, 1500, 5000):
        table.extend(num_positions)
        assert torch.equal(table.values[:num_positions], whole[:num_positions])
    assert table.values.data_ptr() == address
    unused = RotaryTable(rope, 8, 5000, CPU)
    unused.extend(10)
    assert not unused.values[10 + EXTRA_POSITIONS :].any()


LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


YARN: dict[str, Any] = {
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 20.0,
    "beta_slow": 2.0,
    "attention_factor": 1.2,
}


@pytest.mark.parametrize(
    ("scaling", "parameters"), [("none", {}), ("linear", {"factor": 4.0}), ("llama3", LLAMA3), ("yarn", YARN)]
)
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
    table = rotary_table(RopeConfig(theta=5e4, scaling=scaling, **parameters), head_dim, 1024, CPU)
    expected = torch.cat((cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]), dim=-1)
    torch.testing.assert_close(table[positions], expected, rtol=0, atol=2e-5)


def test_frequency_factors_divide_the_frequencies() -> None:
    factors = (1.0, 1.0, 2.0, 8.0)
    table = rotary_table(RopeConfig(theta=100.0, scaling="factors", freq_factors=factors), 8, 4, CPU)
    angles = [3 * 100.0 ** (-2 * i / 8) / factor for i, factor in enumerate(factors)]
    torch.testing.assert_close(table[3, :4], torch.tensor(angles).cos())
    torch.testing.assert_close(table[3, 4:], torch.tensor(angles).sin())


def test_longrope_has_factors_for_short_and_for_long_sequences() -> None:
    rope = RopeConfig(
        theta=100.0,
        scaling="longrope",
        freq_factors=(1.0, 2.0),
        long_factors=(4.0, 8.0),
        original_max_position_embeddings=64,
    )
    for longest, factors in ((64, (1.0, 2.0)), (65, (4.0, 8.0)), (None, (4.0, 8.0))):
        table = RotaryTable(rope, 4, 256, CPU, longest)
        table.extend(4)
        expected = rotary_table(RopeConfig(theta=100.0, scaling="factors", freq_factors=factors), 4, 256, CPU)
        assert torch.equal(table.values[:4], expected[:4])


def test_yarn_needs_a_base_above_one() -> None:
    with pytest.raises(ModelLoadError, match="rope_theta must be above 1 with yarn, got 1"):
        rotary_table(RopeConfig(theta=1.0, scaling="yarn", factor=2.0), 8, 4, CPU)


def test_an_unknown_scaling_is_rejected() -> None:
    with pytest.raises(
        ModelLoadError, match="rope scaling must be none, linear, llama3, factors, yarn or longrope; got 'ntk'"
    ):
        rotary_table(RopeConfig(scaling="ntk"), 8, 4, CPU)
