"""A made-up architecture: its declaration in this file is enough to load, run, plan, simulate and benchmark it.

Norms after both branches (and before the feed-forward network too), windows in every other layer, each kind of layer
with a rotary base and an attention scale of its own, an activation of its own, and multipliers.
"""

from __future__ import annotations

import json
import logging
import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.kernels import AttentionCase, AttentionPass, LinearPass, native_parts
from safetensors.torch import load_file, save_file

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import load_model
from chairlift.engine.startup.weight_plan import step_weight_bytes
from chairlift.kernels.activations import ACTIVATIONS, Activation
from chairlift.kernels.kernel_memory import total
from chairlift.kernels.kernel_set import find_kernel_set
from chairlift.lab.planning.planned_workload import PlannedWorkload
from chairlift.lab.planning.planner import DeploymentPlan, PlannedModel, make_plan
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.devices import Device
from chairlift.lab.sim.model_shape import ModelShape
from chairlift.lab.sim.roofline import Roofline
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.loading.resolve import resolve_model
from chairlift.models.declaration.attention_spec import AttentionSpec, RopeConfig
from chairlift.models.declaration.feed_forward_spec import FeedForwardSpec
from chairlift.models.declaration.layer_spec import BranchNorms, LayerSpec
from chairlift.models.declaration.matrix_spec import ATTENTION, EMBEDDING, LM_HEAD, MLP, MatrixSpec, NormSpec
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.reading.architecture import Architecture
from chairlift.models.reading.config_fields import ConfigFields
from chairlift.models.registry import ARCHITECTURES
from chairlift.models.torch_operations import torch_operations
from support.native import needs_native
from support.parameter_memory import parameter_bytes

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 96, 48, 80, 4, 6, 2, 12, 160
WINDOW, EPS = 9, 1e-5
PLAIN = Device(
    "plain", 1000.0, 100.0, 10**6, "made up", flops_efficiency=1.0, bandwidth_efficiency=1.0, step_overhead=0.0,
    layer_overhead=0.0,
)  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["MadeUpForCausalLM"],
    "model_type": "made_up",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": EPS,
    "sliding_window": WINDOW,
    "rope_theta": 50000.0,
    "local_rope_theta": 100.0,
    "attention_scale": 0.2,
    "local_attention_scale": 0.35,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_multiplier": 0.5,
    "logits_soft_cap": 4.0,
    "hidden_act": "squared_relu",
}


def read_made_up(fields: ConfigFields) -> ModelConfig:
    vocab, hidden = fields.integer("vocab_size"), fields.integer("hidden_size")
    return ModelConfig(
        architecture="made-up", name="made-up", hidden_size=hidden,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        embedding=MatrixSpec(EMBEDDING, EMBEDDING, (("embed", vocab),), hidden),
        layers=tuple(read_layer(fields, index) for index in range(fields.integer("num_hidden_layers"))),
        head=MatrixSpec(LM_HEAD, LM_HEAD, (("unembed", vocab),), hidden),
        final_norm=NormSpec("rms_norm", "norm", hidden, fields.number("rms_norm_eps")),
        embedding_multiplier=fields.number("embedding_multiplier"),
        logits_multiplier=fields.number("logits_multiplier"), logits_soft_cap=fields.number("logits_soft_cap"),
    )  # fmt: skip


def read_layer(fields: ConfigFields, index: int) -> LayerSpec:
    hidden, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps")
    before, after = (NormSpec("rms_norm", f"blocks.{index}.{name}", hidden, eps) for name in ("mlp_in", "mlp_out"))
    multiplier, attended = fields.number("residual_multiplier"), f"blocks.{index}.attention_out"
    return LayerSpec(
        attention=read_attention(fields, index),
        attention_norms=BranchNorms(after=NormSpec("rms_norm", attended, hidden, eps), multiplier=multiplier),
        feed_forward=read_feed_forward(fields, index),
        feed_forward_norms=BranchNorms(before=before, after=after, multiplier=multiplier),
    )


def read_attention(fields: ConfigFields, index: int) -> AttentionSpec:
    hidden, head_dim = fields.integer("hidden_size"), fields.integer("head_dim")
    heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    kinds = (("local_rope_theta", "local_attention_scale", "sliding_window"), ("rope_theta", "attention_scale", None))
    theta, scale, window = kinds[index % 2]
    counts = {"q": heads, "k": kv_heads, "v": kv_heads}
    parts = tuple((f"blocks.{index}.{part}", count * head_dim) for part, count in counts.items())
    return AttentionSpec(
        qkv=MatrixSpec(ATTENTION, "qkv", parts, hidden),
        output=MatrixSpec(ATTENTION, "output", ((f"blocks.{index}.o", hidden),), heads * head_dim), num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, scale=fields.number(scale),
        rope=RopeConfig(theta=fields.number(theta)), sliding_window=None if window is None else fields.integer(window),
    )  # fmt: skip


def read_feed_forward(fields: ConfigFields, index: int) -> FeedForwardSpec:
    hidden, inner = fields.integer("hidden_size"), fields.integer("intermediate_size")
    parts = ((f"blocks.{index}.gate", inner), (f"blocks.{index}.up", inner))
    return FeedForwardSpec(
        up=MatrixSpec(MLP, "gate_up", parts, hidden),
        down=MatrixSpec(MLP, "down", ((f"blocks.{index}.down", hidden),), inner),
        activation=fields.choice("hidden_act", ("squared_relu",)),
        gated=True,
    )


MADE_UP = Architecture(name="made-up", hf_readers={"MadeUpForCausalLM": read_made_up})
SQUARED_RELU = Activation(lambda x: x.clamp(min=0).square())


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, MADE_UP.name, MADE_UP)
    monkeypatch.setitem(ACTIVATIONS, "squared_relu", SQUARED_RELU)


def make_parameters() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)

    def matrix(out: int, size: int) -> torch.Tensor:
        return torch.randn((out, size), generator=draw) * size**-0.5

    def norm() -> torch.Tensor:
        return 1 + 0.3 * torch.randn(HIDDEN, generator=draw)

    parameters = {"embed": matrix(VOCAB, HIDDEN), "unembed": 4 * matrix(VOCAB, HIDDEN), "norm": norm()}
    for i in range(LAYERS):
        block = {"q": matrix(HEADS * HEAD_DIM, HIDDEN), "o": matrix(HIDDEN, HEADS * HEAD_DIM)}
        block |= {name: matrix(KV_HEADS * HEAD_DIM, HIDDEN) for name in ("k", "v")}
        block |= {name: matrix(INNER, HIDDEN) for name in ("gate", "up")}
        block |= {"down": matrix(HIDDEN, INNER)} | {name: norm() for name in ("attention_out", "mlp_in", "mlp_out")}
        parameters |= {f"blocks.{i}.{name}": value for name, value in block.items()}
    return {f"{name}.weight": value for name, value in parameters.items()}


class Twin:
    """The same model in plain torch, for whole sequences."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self._parameters = parameters

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self._parameters[f"{name}.weight"].T

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,), self._parameters[f"{name}.weight"], EPS)

    def attention(self, x: torch.Tensor, i: int) -> torch.Tensor:
        is_local, length = i % 2 == 0, len(x)
        q, k, v = (self.linear(x, f"blocks.{i}.{part}").view(length, -1, HEAD_DIM).transpose(0, 1) for part in "qkv")
        theta = 100.0 if is_local else 50000.0
        angles = torch.outer(torch.arange(length), theta ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (y * cos + torch.cat((-y[..., HEAD_DIM // 2 :], y[..., : HEAD_DIM // 2]), -1) * sin for y in (q, k))
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=0) for y in (k, v))
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        hidden = (distance < 0) | (distance >= (WINDOW if is_local else length))
        scores = (q @ k.transpose(1, 2) * (0.35 if is_local else 0.2)).masked_fill(hidden, -math.inf)
        return self.linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"blocks.{i}.o")

    def mlp(self, x: torch.Tensor, i: int) -> torch.Tensor:
        gate, up = (self.linear(x, f"blocks.{i}.{part}") for part in ("gate", "up"))
        return self.linear(gate.relu() ** 2 * up, f"blocks.{i}.down")

    def logits(self, tokens: list[int]) -> torch.Tensor:
        x = 3.0 * self._parameters["embed.weight"][tokens]
        for i in range(LAYERS):
            x = x + 0.7 * self.norm(self.attention(x, i), f"blocks.{i}.attention_out")
            x = x + 0.7 * self.norm(self.mlp(self.norm(x, f"blocks.{i}.mlp_in"), i), f"blocks.{i}.mlp_out")
        return 4.0 * torch.tanh(0.5 * self.linear(self.norm(x, "norm"), "unembed") / 4.0)

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made_up")
    write(folder, CONFIG, make_parameters())
    return folder


def write(folder: Path, config: dict[str, Any], parameters: dict[str, torch.Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(parameters, folder / "model.safetensors")


def engine_config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        skip_tokenizer_init=True,
        num_threads=1,
        **{"num_kv_blocks": 120, "block_size": 4, "kv_cache_dtype": "float32", **options},
    )


def make_prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(VOCAB) for _ in range(length)] for length in (1, 5, 8, 9, 10, 40, 71)]


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("budget", [512, 11])
def test_declared_architecture_generates_the_tokens_of_its_torch_twin(folder: Path, backend: str, budget: int) -> None:
    config = engine_config(folder, kernels=backend, max_num_batched_tokens=budget, max_num_seqs=6)
    llm = LLM(engine=build_engine(config))
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    answers = [output.outputs[0].token_ids for output in llm.generate(make_prompts(), params, use_tqdm=False)]
    twin = Twin(load_file(folder / "model.safetensors"))
    assert answers == [twin.generate(prompt, 14) for prompt in make_prompts()]
    assert len({tuple(answer) for answer in answers}) > 4, "the answers depend on their prompts"


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("quantization", [None, "q8_0"])
def test_planned_weight_bytes_equal_loaded_bytes(folder: Path, backend: str, quantization: str | None) -> None:
    if backend == "torch" and quantization is not None:
        pytest.skip("only native kernels quantize")
    loaded = load_model(engine_config(folder, kernels=backend, quantization=quantization))
    assert parameter_bytes(loaded.model) == total(loaded.planned_weights)


def make_made_up_plan(folder: Path, **options: Any) -> DeploymentPlan:
    files = resolve_model(str(folder))
    config = files.config()
    model = PlannedModel("made-up", str(folder), config, files.formats(config))
    return make_plan(
        model,
        engine_config(folder, **options),
        PlannedWorkload(input_len=parse_lengths("fixed:20"), output_len=parse_lengths("fixed:10")),
    )


@needs_native
def test_plan_reports_the_operations_that_torch_computes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = make_made_up_plan(folder, kernels="native")
    (note,) = [note for note in plan.notes if note.startswith("native kernels do not support")]
    assert "activation squared_relu_and_mul" in note
    assert [item.num_bytes > 0 for item in plan.memory.activations if "torch" in item.name] == [True]
    with caplog.at_level(logging.INFO, logger="chairlift"):
        load_model(engine_config(folder, kernels="native"))
    assert note in caplog.messages
    torch_plan = make_made_up_plan(folder, kernels="torch")
    assert not any("native kernels" in note for note in torch_plan.notes)


def test_slot_bytes_are_the_sum_over_layers(folder: Path) -> None:
    plan = make_made_up_plan(folder, kernels="torch")
    num_groups = len(plan.memory.pool.windows)
    assert num_groups * plan.memory.slot_bytes == LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
    assert plan.fit.num_fit == 120 // (8 + 4)


def test_torch_operations_are_listed_once(folder: Path) -> None:
    config = resolve_model(str(folder)).config()
    assert torch_operations(config) == ["activation squared_relu_and_mul"]


def test_cost_model_computes_the_time_of_the_declared_layers(folder: Path) -> None:
    """The device computes 1000 FLOPs per second and reads 100 bytes per second."""
    config = resolve_model(str(folder)).config()
    narrow = replace(config.layers[0].feed_forward.down, in_features=INNER // 2)
    layer = replace(config.layers[0], feed_forward=replace(config.layers[0].feed_forward, down=narrow))
    weights = HIDDEN * HEAD_DIM * 2 * (HEADS + KV_HEADS) + 3 * HIDDEN * INNER
    shape = ModelShape("made-up", replace(config, layers=(layer, *config.layers[1:])))
    assert shape.weight_bytes == 2 * (LAYERS * weights - HIDDEN * INNER // 2 + VOCAB * HIDDEN)
    assert shape.kv_bytes_per_slot == 2 * LAYERS * 2 * KV_HEADS * HEAD_DIM
    cost = Roofline(shape, PLAIN)
    prefill = StepShape(num_tokens=60, num_seqs=1, num_sampled=0, num_context=60, num_pairs=1830)
    linear = 60 * 2 * (LAYERS * weights - HIDDEN * INNER // 2) / 1000
    assert cost.seconds(prefill) == pytest.approx(linear + LAYERS * 1830 * 4 * HEADS * HEAD_DIM / 1000)


@needs_native
def test_kernel_benchmark_measures_the_declared_products(folder: Path) -> None:
    declared = resolve_model(str(folder)).config()
    formats = resolve_model(str(folder)).formats(declared)
    linear = LinearPass(declared, partial(native_parts, formats=formats, quantization=None), max_rows=3)
    work = linear.work(3)
    assert set(work) == set(linear(3)) == {"layers", "qkv", "output", "gate_up", "down", "LM head"}
    native = find_kernel_set("native").memory("float32", "cpu", None)
    read = work["layers"].num_bytes + work["LM head"].num_bytes
    assert read == step_weight_bytes(declared, native, formats)
    decode = AttentionPass(declared, torch.bfloat16, 16, AttentionCase(num_seqs=2, num_queries=1, context=24))
    keys = (LAYERS // 2 * WINDOW + LAYERS // 2 * 24) / LAYERS
    assert decode.work("avx2").num_operations == 2 * keys * 4 * HEADS * HEAD_DIM
