"""Mixtures with a sigmoid router over grouped heads: published sizes, and the layouts of their files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_gguf_parity import assert_logits_of_transformers, load
from test_published_configs import read
from transformers import AutoModelForCausalLM

from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.torch_operations import torch_operations
from support.native import needs_native

TinyModelDir = Callable[..., Path]
MODELS = ("minimax_m2", "solar_open", "dots1", "hy_v3", "afmoe", "exaone_moe", "glm4_moe", "deepseek_v3")


@pytest.mark.parametrize(
    ("name", "num_weights"),
    [
        ("MiniMax-M2.7", 228_688_920_576),
        ("Solar-Open-100B", 102_651_396_096),
        ("dots.llm1.inst", 142_773_846_016),
        ("Hy3-preview", 295_032_848_384),
        ("Trinity-Mini", 26_123_698_176),
        ("K-EXAONE-236B-A23B", 236_570_542_080),
    ],
)
def test_published_sizes(name: str, num_weights: int) -> None:
    config = read(name)
    assert sum(matrix.num_weights for matrix in config.matrices) == num_weights
    assert torch_operations(config) == []


def test_published_files_of_minimax_have_the_number_of_rotated_dimensions() -> None:
    (rope,) = {spec.rope for spec in read("MiniMax-M2.7").attention_specs.values()}
    assert rope == RopeConfig(theta=5e6, rotary_dim=64)
    (whole,) = {spec.rope for spec in read("MiniMax-M2.7", rotary_dim=None).attention_specs.values()}
    assert whole == RopeConfig(theta=5e6)


def test_published_files_of_dots_have_the_method_in_the_field_of_the_score() -> None:
    assert read("dots.llm1.inst") == read("dots.llm1.inst", scoring_func="sigmoid", topk_method="noaux_tc")


@pytest.mark.parametrize("arch", MODELS)
def test_files_with_the_parameters_of_transformers(arch: str, tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    """transformers converts names and experts to those of published files, unless it is told not to."""
    folder = tiny_model_dir(arch)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path, save_original_format=False)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    assert not names & {name for name in load_file(folder / "model.safetensors") if ".experts." in name}
    assert_logits_of_transformers(load(tmp_path), folder)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
def test_fp8_folders_of_minimax(kernels: str, tiny_model_dir: TinyModelDir, tmp_path: Path) -> None:
    """The published folder has all matrices in FP8 but those of routers and the LM head."""
    whole, quantized = (Path(shutil.copytree(tiny_model_dir("minimax_m2"), tmp_path / name)) for name in "ab")
    tensors = load_file(whole / "model.safetensors")
    kept = ("gate.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight", "e_score_correction_bias")
    names = [name for name in tensors if not name.endswith(kept)]
    assert len(names) == 2 * (4 + 3 * 8)
    scales = {f"{name}_scale_inv": torch.rand(-(-len(tensors[name]) // 128), 1) for name in names}
    blocks = {name: (tensors[name] * 16).to(torch.float8_e4m3fn) for name in names}
    for name in names:
        tensors[name] = blocks[name].float() * scales[f"{name}_scale_inv"]
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    save_file({**tensors, **blocks, **scales}, quantized / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((quantized / "config.json").read_text())
    method = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        "weight_block_size": [128, 128],
    }
    (quantized / "config.json").write_text(json.dumps({**fields, "quantization_config": method}))
    assert_logits_of_transformers(load(quantized, kernels), whole)
