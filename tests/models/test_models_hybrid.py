"""Layers with recurrent state: each form of a layer, the states of steps, and the sizes that follow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from benchmarks.products import layer_products

from chairlift.kernels.recurrence import StateStep
from chairlift.models.declaration.attention_spec import AttentionSpec
from chairlift.models.declaration.feed_forward_spec import FeedForwardSpec
from chairlift.models.declaration.layer_spec import BranchNorms, LayerSpec
from chairlift.models.declaration.matrix_spec import EMBEDDING, LM_HEAD, MLP, RECURRENCE, MatrixSpec, NormSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.declaration.recurrence_spec import ConvolutionSpec, GatedDeltaSpec, Mamba2Spec, RecurrenceSpec
from chairlift.models.decoder import DecoderModel, build_model
from chairlift.models.kv_layout import KVLayout
from support.packed_steps import Tables, pack
from support.parameter_memory import parameter_bytes
from support.recurrences import state_step

HIDDEN, VOCAB, EPS = 32, 61, 1e-6
BLOCK_SIZE, NUM_BLOCKS = 4, 40


def matrix(name: str, out: int, size: int = HIDDEN) -> MatrixSpec:
    return MatrixSpec(RECURRENCE, name.rpartition(".")[2], ((name, out),), size)


def norm(name: str, size: int = HIDDEN) -> NormSpec:
    return NormSpec("rms_norm", name, size, EPS)


def attention(name: str) -> AttentionSpec:
    parts = ((f"{name}.q", 32), (f"{name}.k", 16), (f"{name}.v", 16))
    return AttentionSpec(MatrixSpec("attention", "qkv", parts, HIDDEN), matrix(f"{name}.o", HIDDEN), 4, 2, 8, 0.3)


def gated_delta(name: str) -> RecurrenceSpec:
    rule = GatedDeltaSpec(num_key_heads=2, num_heads=4, key_dim=6, value_dim=5, name=name, norm=norm(f"{name}.norm", 5))
    channels = 2 * 12 + 20
    return RecurrenceSpec(
        matrix(f"{name}.in", channels + 20 + 8),
        matrix(f"{name}.out", HIDDEN, 20),
        ConvolutionSpec(f"{name}.conv", channels, 4),
        rule,
    )


def mamba2(name: str) -> RecurrenceSpec:
    rule = Mamba2Spec(
        num_heads=4,
        head_dim=6,
        num_groups=2,
        state_size=5,
        name=name,
        norm=norm(f"{name}.norm", 24),
        projection_scales=(0.5, 1.5, 2.0, 0.25, 3.0),
    )
    return RecurrenceSpec(
        matrix(f"{name}.in", sum(rule.row_parts)),
        matrix(f"{name}.out", HIDDEN, 24),
        ConvolutionSpec(f"{name}.conv", 24 + 20, 4, has_bias=True),
        mamba2=rule,
    )


def short_convolution(name: str) -> RecurrenceSpec:
    conv = ConvolutionSpec(f"{name}.conv", HIDDEN, 3)
    return RecurrenceSpec(matrix(f"{name}.in", 3 * HIDDEN), matrix(f"{name}.out", HIDDEN), conv)


def feed_forward(name: str) -> FeedForwardSpec:
    up = MatrixSpec(MLP, "gate_up", ((f"{name}.gate", 24), (f"{name}.up", 24)), HIDDEN)
    return FeedForwardSpec(up, MatrixSpec(MLP, "down", ((f"{name}.down", HIDDEN),), 24), "silu", gated=True)


def branch(name: str, multiplier: float = 1.0) -> BranchNorms:
    return BranchNorms(norm(name), multiplier=multiplier)


LAYERS = (
    LayerSpec(None, BranchNorms(), feed_forward("0.mlp"), branch("0.b"), gated_delta("0"), branch("0.a")),
    LayerSpec(attention("1"), branch("1.a"), None, BranchNorms()),
    LayerSpec(
        attention("2"), branch("2.a", 0.5), feed_forward("2.mlp"), branch("2.b"), mamba2("2"), branch("2.c", 0.7)
    ),
    LayerSpec(None, BranchNorms(), feed_forward("3.mlp"), branch("3.b")),
    LayerSpec(None, BranchNorms(), None, BranchNorms(), short_convolution("4"), branch("4.a")),
    LayerSpec(attention("5"), branch("5.a"), None, BranchNorms(), mamba2("5"), branch("5.c")),
)
CONFIG = ModelConfig(
    architecture="llama",
    name="hybrid",
    hidden_size=HIDDEN,
    max_position_embeddings=128,
    embedding=MatrixSpec(EMBEDDING, EMBEDDING, (("embed", VOCAB),), HIDDEN),
    layers=LAYERS,
    head=MatrixSpec(LM_HEAD, LM_HEAD, (("embed", VOCAB),), HIDDEN),
    final_norm=norm("norm"),
    tie_word_embeddings=True,
)


class DrawnWeights:
    """Weights of which every value counts, and which remembers them."""

    def __init__(self) -> None:
        self.drawn: dict[str, torch.Tensor] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self.drawn:
            generator = torch.Generator().manual_seed(sum(name.encode()) * 7 + len(name))
            self.drawn[name] = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.5)
        assert self.drawn[name].shape == shape
        return self.drawn[name]


def make_model(kernels: str = "torch") -> tuple[DecoderModel, DrawnWeights]:
    weights = DrawnWeights()
    model = build_model(CONFIG, weights, dtype=torch.float32, device="cpu", kernels=kernels)  # type: ignore[arg-type]
    model.allocate_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
    model.allocate_states(4)
    return model, weights


def run(model: DecoderModel, tables: Tables, work: list[tuple[int, int, int]], tokens: list[int]) -> torch.Tensor:
    """The logits of a step; sequence i has slot i."""
    step = pack(tables, work)
    ids = torch.tensor([tokens[position] for _, start, stop in work for position in range(start, stop)])
    slots = [sequence for sequence, _, _ in work]
    sources = [sequence if start else -1 for sequence, start, _ in work]
    states: StateStep = state_step([stop - start for _, start, stop in work], sources, slots)
    with torch.inference_mode():
        return model.logits(model.forward(ids, step.positions, model.plan(step.metadata, states=states)))


class Twin:
    def __init__(self, model: DecoderModel, weights: DrawnWeights) -> None:
        self._model, self._weights = model, weights.drawn

    def linear(self, x: torch.Tensor, spec: MatrixSpec) -> torch.Tensor:
        return torch.cat([x @ self._weights[name].T for name in spec.weight_names], dim=1)

    def norm(self, x: torch.Tensor, spec: NormSpec | None) -> torch.Tensor:
        return x if spec is None else F.rms_norm(x, (spec.size,), self._weights[f"{spec.name}.weight"], EPS)

    def attention(self, x: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        q, k, v = torch.split(self.linear(x, spec.qkv), [32, 16, 16], dim=1)
        q, k, v = (part.view(len(x), -1, 8).transpose(0, 1) for part in (q, k, v))
        k, v = (part.repeat_interleave(2, dim=0) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale)
        return self.linear(attended.transpose(0, 1).flatten(1), spec.output)

    def recurrence(self, x: torch.Tensor, spec: RecurrenceSpec, index: int) -> torch.Tensor:
        mixer = self._model.layers[index].recurrence
        assert mixer is not None
        state = mixer._kernel.allocate(1)
        mixed = mixer._kernel(self.linear(x, spec.input), state, state_step([len(x)], [-1], [0]))
        return self.linear(mixed, spec.output)

    def feed_forward(self, x: torch.Tensor, spec: FeedForwardSpec) -> torch.Tensor:
        gate, up = self.linear(x, spec.up).chunk(2, dim=1)
        return self.linear(F.silu(gate) * up, spec.down)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        x = self._weights["embed.weight"][tokens]
        for index, layer in enumerate(LAYERS):
            stream = x
            if layer.attention is not None:
                norms = layer.attention_norms
                x = x + norms.multiplier * self.attention(self.norm(stream, norms.before), layer.attention)
            if layer.recurrence is not None:
                norms = layer.recurrence_norms
                x = x + norms.multiplier * self.recurrence(self.norm(stream, norms.before), layer.recurrence, index)
            if layer.feed_forward is not None:
                x = x + self.feed_forward(self.norm(x, layer.feed_forward_norms.before), layer.feed_forward)
        return self.norm(x, CONFIG.final_norm) @ self._weights["embed.weight"].T


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_every_form_of_a_layer_is_its_formula(kernels: str) -> None:
    model, weights = make_model(kernels)
    tokens = [(7 * i + i * i) % VOCAB for i in range(11)]
    found = run(model, Tables(NUM_BLOCKS, BLOCK_SIZE), [(0, 0, 11)], tokens)
    expected = Twin(model, weights).logits(tokens)
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_chunks_in_a_crowd_give_the_logits_of_the_whole_prompt(kernels: str) -> None:
    model, _ = make_model(kernels)
    tokens = [(5 * i + 3) % VOCAB for i in range(13)]
    whole = run(model, Tables(NUM_BLOCKS, BLOCK_SIZE), [(3, 0, 13)], tokens)
    tables = Tables(NUM_BLOCKS, BLOCK_SIZE, seed=1)
    parts = [
        run(model, tables, [(0, 0, 4), (1, 0, 2)], tokens)[:4],
        run(model, tables, [(1, 2, 9), (0, 4, 5)], tokens)[7:],
        run(model, tables, [(0, 5, 12), (1, 9, 10)], tokens)[:7],
        run(model, tables, [(1, 10, 11), (0, 12, 13)], tokens)[1:],
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=2e-4, atol=2e-4)


def test_sizes_follow_from_the_declaration() -> None:
    model, _ = make_model()
    assert sorted(CONFIG.attention_specs) == [1, 2, 5] == sorted(model.attention_layers)
    layout = KVLayout.by_window(CONFIG, 128)
    assert layout == KVLayout.one_group(CONFIG) == KVLayout((None,), ((1, 2, 5),))
    assert [spec.num_heads for spec in layout.positions(CONFIG)] == [4, 4, 4]
    assert CONFIG.kv_values_per_token == 3 * 2 * 16
    states = [layer.recurrence.state for layer in model.layers if layer.recurrence is not None]
    values = sum(each[0].numel() for state in states if state is not None for each in state if each is not None)
    assert CONFIG.state_values_per_sequence == values == (44 * 3 + 4 * 30) + 2 * (44 * 3 + 4 * 30) + 32 * 2


def test_states_are_no_parameters_and_parameters_are_counted() -> None:
    model, _ = make_model("reference")
    before = parameter_bytes(model)
    model.allocate_states(1000)
    assert parameter_bytes(model) == before
    declared = sum(matrix.num_weights for matrix in CONFIG.matrices) + HIDDEN
    assert before == 4 * (declared + sum(layer.num_values_beside_matrices for layer in LAYERS))


def test_layers_of_one_branch_have_its_products_only() -> None:
    names = [[product.matrix.kernel for product in layer_products(layer)] for layer in LAYERS]
    assert names[1] == ["qkv", "o"]
    assert names[3] == ["gate_up", "down"]
    assert names[4] == ["in", "out"]
    assert names[5] == ["in", "out", "qkv", "o"]
    assert [layer.is_fused for layer in LAYERS] == [True, True, False, True, True, False]
    fused = replace(LAYERS[2], recurrence=None, attention_norms=branch("a"))
    assert fused.is_fused
