"""gpt-oss: its declaration, and checkpoints with experts in MXFP4 against the dequantized model in transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_gguf_parity import assert_logits_of_transformers, load, write_gguf
from test_models_parity import expected_logits, prompts, run
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from chairlift import EngineConfig
from chairlift.engine.startup.loaded_model import load_model
from chairlift.errors import ModelLoadError
from chairlift.kernels.cpu.formats import matrix_bytes
from chairlift.kernels.kernel_memory import total
from chairlift.kernels.routing import ExpertRouting
from chairlift.loading.resolve import resolve_model
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.declaration.matrix_spec import EXPERTS
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.registry import read_hf_config
from chairlift.models.torch_operations import torch_operations
from support.native import needs_native
from support.packed_steps import Tables
from support.parameter_memory import parameter_bytes

TinyModelDir = Callable[..., Path]
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
"""The shape of gpt-oss-20b with the fields of its published config.json."""


def read(**changes: Any) -> ModelConfig:
    return read_hf_config({**GPT_OSS_20B, **changes}, source="config.json")


def test_gpt_oss_20b() -> None:
    config = read()
    values = sum(layer.num_values_beside_matrices for layer in config.layers) + config.hidden_size
    assert sum(matrix.num_weights for matrix in config.matrices) + values == 20_914_757_184
    assert [layer.attention.sliding_window for layer in config.layers] == [128, None] * 12
    first, mlp = config.layers[0].attention, config.layers[0].feed_forward
    assert first.sinks == "model.layers.0.self_attn.sinks"
    assert first.rope == RopeConfig(
        150000.0,
        "yarn",
        32.0,
        original_max_position_embeddings=4096,
        truncate=False,
        attention_factor=1.3465735902799727,
    )
    assert mlp.router is not None
    assert (mlp.router.routing, mlp.activation) == (ExpertRouting(4, "chosen"), "swigluoai")
    assert all(matrix.has_bias for matrix in config.layers[0].matrices)
    assert torch_operations(config) == []


def test_types_of_layers_that_the_file_does_not_contain() -> None:
    windows = [layer.attention.sliding_window for layer in read(layer_types=None).layers]
    assert windows == [128, None] * 12
    assert {layer.attention.qkv.has_bias for layer in read(attention_bias=False).layers} == {False}
    config = read(sliding_window=None, layer_types=["full_attention"] * 24)
    assert {layer.attention.sliding_window for layer in config.layers} == {None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5.0, which is not supported: experts must be activated with"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0, which is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported; supported: silu"),
        ({"experts_per_token": 2}, "experts_per_token is 2, which is not supported: num_experts_per_tok is 4"),
        ({"initial_context_length": 64}, "initial_context_length is 64, .* original_max_position_embeddings is 4096"),
        ({"rope_scaling": None}, "rope_scaling is missing"),
        ({"sliding_window": None}, "layer_types must hold 24 of full_attention"),
        ({"sliding_window": None, "layer_types": None}, "sliding_window is missing"),
        ({"num_local_experts": None}, "num_experts is missing"),
        ({"expert_capacity": 0.1}, "expert_capacity is 0.1, and the gpt-oss architecture does not declare"),
        (
            {"quantization_config": {"quant_method": "mxfp4", "dequantize": True}},
            "dequantize is True, which is not supp",
        ),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(**changes)


class Checkpoint(NamedTuple):
    """A model with experts in MXFP4, and the same numbers as floats."""

    quantized: Path
    floats: Path


def quantize_experts(folder: Path, quantized: Path) -> Path:
    """Write a copy of a folder whose experts are random in MXFP4, and put their values into the folder."""
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    found = {}
    for name in [name for name in tensors if "experts" in name and name.endswith("proj")]:
        experts, inputs, out = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, out, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts, out, inputs // 32), generator=generator, dtype=torch.uint8)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        found |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    shutil.copytree(folder, quantized)
    others = {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in found}
    save_file({**others, **found}, quantized / "model.safetensors")
    edit_config(quantized, quantization_config=GPT_OSS_20B["quantization_config"])
    return quantized


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def checkpoint(tiny_model_dir: TinyModelDir, tmp_path: Path) -> Checkpoint:
    floats = shutil.copytree(tiny_model_dir("gpt_oss", intermediate_size=96), tmp_path / "floats")
    return Checkpoint(quantize_experts(floats, tmp_path / "quantized"), floats)


def write_mxfp4_gguf(checkpoint: Checkpoint) -> Path:
    """Convert the checkpoint. Values of MXFP4 are rounded to themselves."""
    kind = gguf.GGMLQuantizationType.MXFP4
    sizes = {"feed_forward_length": 96, "expert_feed_forward_length": 96}
    return write_gguf(
        checkpoint.floats, "gpt_oss", checkpoint.floats / "model.gguf", kind, rounds_experts=True, **sizes
    )


@pytest.mark.parametrize("file", ["safetensors", "gguf"])
def test_experts_in_mxfp4_give_the_logits_of_transformers(file: str, checkpoint: Checkpoint) -> None:
    path = checkpoint.quantized if file == "safetensors" else write_mxfp4_gguf(checkpoint)
    assert_logits_of_transformers(load(path, "torch"), checkpoint.floats)


@needs_native
@pytest.mark.parametrize("file", ["safetensors", "gguf"])
def test_native_kernels_compute_experts_from_the_numbers_of_the_file(file: str, checkpoint: Checkpoint) -> None:
    """Native kernels round activations to 8 bits, which changes the choice of an expert in some rows."""
    path = checkpoint.quantized if file == "safetensors" else write_mxfp4_gguf(checkpoint)
    files = resolve_model(str(path))
    assert files.formats(files.config())("model.layers.1.mlp.experts.3.up_proj.weight") == "mxfp4"
    model = load(path, "native")
    model.allocate_kv_cache(num_blocks=64, block_size=8)
    with torch.inference_mode():
        found = run(model, Tables(64, 8), [(sequence, 0, len(prompt)) for sequence, prompt in prompts().items()])
        expected = expected_logits(checkpoint.floats)
    errors = torch.cat([(found[i] - rows).norm(dim=-1) / rows.norm(dim=-1) for i, rows in expected.items()])
    assert float(errors.median()) < 0.03


@needs_native
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_weights_in_mxfp4_are_planned_to_the_byte(quantization: str | None, checkpoint: Checkpoint) -> None:
    config = EngineConfig(str(checkpoint.quantized), skip_tokenizer_init=True, num_threads=1, quantization=quantization)
    loaded = load_model(config)
    assert parameter_bytes(loaded.model) == total(loaded.planned_weights)
    kind = quantization or "mxfp4"
    items = {item.name: item.num_bytes for item in loaded.planned_weights}
    assert items[EXPERTS] == 2 * 5 * (matrix_bytes(kind, 2 * 96, 64) + matrix_bytes(kind, 64, 96))


Edit = Callable[[dict[str, torch.Tensor]], Any]
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
WRONG: dict[str, tuple[Edit, dict[str, Any], str]] = {
    "scales are missing": (lambda t: t.pop(f"{GATE_UP}_scales"), {}, r"gate_up_proj_scales is missing"),
    "another number of experts": (
        lambda t: t.update({f"{GATE_UP}_blocks": t[f"{GATE_UP}_blocks"][:4].clone()}),
        {},
        r"gate_up_proj_blocks has the shape \(4, 192, 2, 16\), but the configuration requires \(5, 192, 2, 16\)",
    ),
    "another number of rows": (
        lambda t: t.update({f"{GATE_UP}_scales": t[f"{GATE_UP}_scales"][:, 2:].clone()}),
        {},
        r"gate_up_proj_scales has the shape \(5, 190, 2\), but the configuration requires \(5, 192, 2\)",
    ),
    "another type": (
        lambda t: t.update({f"{GATE_UP}_blocks": t[f"{GATE_UP}_blocks"].view(torch.int8)}),
        {},
        "gate_up_proj_blocks is torch.int8, but MXFP4 requires torch.uint8",
    ),
    "NaN": (lambda t: t[f"{GATE_UP}_scales"][2].fill_(255), {}, r"gate_up_proj_scales contains NaN"),
    "no quantization": (lambda t: None, {"quantization_config": None}, "quantization_config in config.json is missing"),
    "another method": (
        lambda t: None,
        {"quantization_config": {"quant_method": "fp8"}},
        "gate_up_proj is stored in MXFP4, but config.json has quant_method fp8",
    ),
    "sinks of another number of heads": (
        lambda t: t.update({"model.layers.0.self_attn.sinks": torch.zeros(5)}),
        {},
        r"self_attn.sinks has the shape \(5,\), but the configuration requires \(4,\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_checkpoints_name_the_tensor(case: str, checkpoint: Checkpoint) -> None:
    edit, changes, message = WRONG[case]
    tensors = load_file(checkpoint.quantized / "model.safetensors")
    edit(tensors)
    save_file(tensors, checkpoint.quantized / "model.safetensors")
    edit_config(checkpoint.quantized, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load(checkpoint.quantized)


def test_mxfp4_needs_multiples_of_32_inputs(checkpoint: Checkpoint) -> None:
    files = resolve_model(str(checkpoint.quantized))
    weights = files.weights(files.config(), torch.float32, torch.device("cpu"))
    with pytest.raises(ModelLoadError, match="blocks has blocks of 32 inputs, but the configuration requires 80"):
        weights.packed("model.layers.0.mlp.experts.0.up_proj.weight", (96, 80))
