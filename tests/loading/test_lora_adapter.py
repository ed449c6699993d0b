"""Adapters that are not supported, do not fit the model or are damaged are rejected with the reason."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift.errors import ModelLoadError
from chairlift.loading.lora_adapter import read_lora_adapter
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.registry import read_hf_config
from support.case_loop import loop_over
from support.lora_adapters import write_adapter

LAYER = "base_model.model.model.layers.0"


def declare(folder: Path) -> ModelConfig:
    return read_hf_config(json.loads((folder / "config.json").read_text()), source="config.json")


@pytest.fixture(scope="module")
def model(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    return write_adapter(model, tmp_path / "adapter", target_modules=["q_proj", "down_proj"], r=4, lora_alpha=8)


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_an_adapter_has_its_scale_in_b(model: Path, adapter: Path) -> None:
    matrices = read_lora_adapter(str(adapter), declare(model), 4)
    stored = load_file(adapter / "adapter_model.safetensors")
    a, b = matrices["model.layers.0.self_attn.q_proj"]
    torch.testing.assert_close(a, stored[f"{LAYER}.self_attn.q_proj.lora_A.weight"])
    torch.testing.assert_close(b.t(), 2 * stored[f"{LAYER}.self_attn.q_proj.lora_B.weight"])
    assert set(matrices) == {
        f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported: train the adapter without it"),
        ({"bias": "lora_only"}, r"Invalid enum value 'lora_only' - at `\$.bias`"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
        ({"trainable_token_indices": [1]}, r"trainable_token_indices=\[1\] is not supported"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters=.* is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication=.* is not supported"),
        ({"new_kind_of_scale": 3}, "new_kind_of_scale=3 is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the weights of the base model: convert the adapter"),
        ({"peft_type": "IA3"}, r"Invalid enum value 'IA3' - at `\$.peft_type`"),
        ({"r": 0}, r"Expected `int` >= 1 - at `\$.r`"),
        ({"lora_alpha": "16"}, r"Expected `float`, got `str` - at `\$.lora_alpha`"),
        ({"lora_alpha": 10**400}, r"out of range|at `\$.lora_alpha`"),
        ({"lora_alpha": math.nan}, "is not valid JSON"),
        ({"lora_alpha": 1e8}, r"lora_alpha=1e\+08 and rank 4 scale by 2.5e\+07, above 10000"),
        ({"use_rslora": "yes"}, r"at `\$.use_rslora`"),
        ({"rank_pattern": ["q_proj"]}, r"Expected `object \| null`, got `array` - at `\$.rank_pattern`"),
        ({"rank_pattern": {"q_proj": True}}, r"Expected `int`, got `bool` - at `\$.rank_pattern"),
        ({"rank_pattern": {"(": 4}}, r"'\(' is not a regular expression"),
        ({"alpha_pattern": {"(a+)+b": 4}}, r"the patterns up to '\(a\+\)\+b' are too many or too complex"),
        ({"alpha_pattern": {".*.*.*.*.*q": 4}}, "too many or too complex: use the names of modules"),
        ({"alpha_pattern": {str(number): 4 for number in range(5000)}}, "too many or too complex"),
        ({"r": 5}, r"have the shapes \[4, 96\] and \[64, 4\], but rank 5 .* need \[5, 96\] and \[64, 5\]"),
    ],
)
def test_configurations_that_are_not_supported(fields: Any, message: str, model: Path, adapter: Path) -> None:
    change_config(adapter, **fields)
    with pytest.raises(ModelLoadError, match=message):
        read_lora_adapter(str(adapter), declare(model), 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{LAYER}.self_attn.q_proj.lora_B.weight": None}, "self_attn.q_proj has lora_A only: the file is incomplete"),
        ({f"{LAYER}.self_attn.q_proj.lora_B.weight": torch.full((64, 4), torch.nan)}, "values that are not finite"),
        (
            {f"{LAYER}.self_attn.q_proj.lora_A.weight": torch.ones(4, 64, dtype=torch.float8_e4m3fn)},
            r"\(F8_E4M3\) is not supported: .* in one of F32, F16, BF16",
        ),
        ({f"{LAYER}.self_attn.q_proj.lora_B.weight": torch.full((64, 4), 3e38)}, "values that are not finite"),
        ({f"{LAYER}.self_attn.q_proj.lora_magnitude_vector": torch.ones(64)}, "magnitude_vector .* is not supported"),
        ({f"{LAYER}.self_attn.q_proj.lora_A.weight": torch.ones(4, 32)}, "was trained for another model"),
        (
            {
                "base_model.model.lm_head.lora_A.weight": torch.ones(4, 64),
                "base_model.model.lm_head.lora_B.weight": torch.ones(256, 4),
            },
            "lm_head is a matrix of the group 'LM head'; adapters of this model are supported in mlp.down_proj",
        ),
    ],
)
def test_tensors_that_are_not_supported(changes: Any, message: str, model: Path, adapter: Path) -> None:
    change_tensors(adapter, changes)
    with pytest.raises(ModelLoadError, match=message):
        read_lora_adapter(str(adapter), declare(model), 16)


def test_an_adapter_of_another_model(adapter: Path, model: Path, tiny_model_dir: Callable[..., Path]) -> None:
    with pytest.raises(
        ModelLoadError, match=r"need \[4, 96\] and \[32, 4\]: the adapter was trained for another model"
    ):
        read_lora_adapter(str(adapter), declare(tiny_model_dir("llama", hidden_size=32)), 16)
    with pytest.raises(ModelLoadError, match=r"is no module of this model \(llama, 1 layers\)"):
        read_lora_adapter(str(adapter), declare(tiny_model_dir("llama", num_hidden_layers=1)), 16)
    with pytest.raises(ModelLoadError, match=r"is no module of this model \(opt, 2 layers\).*base_model_name_or_path="):
        read_lora_adapter(str(adapter), declare(tiny_model_dir("opt")), 16)


@loop_over(
    ("arch", "module", "message"),
    [
        (
            "lfm2",
            "layers.0.conv.conv",
            "is a convolution; adapters of this model are supported in conv.in_proj, conv.out",
        ),
        (
            "qwen3_5",
            "layers.0.linear_attn.conv1d",
            "is a convolution; .* supported in linear_attn.in_proj_a, linear_attn",
        ),
        ("olmo_hybrid", "layers.0.linear_attn.q_conv1d", "is a convolution; adapters"),
        (
            "granite4_h",
            "layers.0.mamba.conv1d",
            "is a convolution; adapters of this model are supported in mamba.in_proj",
        ),
        ("granite4_h_moe", "layers.0.block_sparse_moe.router.layer", "is a matrix of the group 'router'"),
        ("qwen3_5_moe", "layers.0.mlp.experts.base_layer", "is a matrix of the group 'experts'; adapters"),
        ("qwen3_5_moe", "layers.0.mlp.gate", "is a matrix of the group 'router'"),
        ("lfm2_moe", "layers.3.feed_forward.gate", "is a matrix of the group 'router'"),
        ("falcon_h1", "layers.0.mamba.other", "is no module of this model"),
    ],
)
def test_other_modules_of_recurrent_models_are_rejected(
    arch: str, module: str, message: str, adapter: Path, tiny_model_dir: Callable[..., Path]
) -> None:
    pair = {f"base_model.model.model.{module}.lora_{kind}.weight": torch.ones(2, 2) for kind in "AB"}
    save_file(pair, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        read_lora_adapter(str(adapter), declare(tiny_model_dir(arch)), 16)


def test_the_factors_of_a_gguf_file_are_not_known(adapter: Path, tiny_model_dir: Callable[..., Path]) -> None:
    config = replace(declare(tiny_model_dir("falcon_h1")), name="falcon-h1")
    with pytest.raises(ModelLoadError, match="not supported with a GGUF file, whose matrices contain factors"):
        read_lora_adapter(str(adapter), config, 16)


def test_ranks_of_tensors_count_where_patterns_were_sorted(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In training the narrow pattern is first, and gives rank 3 and alpha 9; PEFT saves the patterns sorted."""
    narrow, wide = "layers.1.self_attn.q_proj", ".*_proj"
    patterns = {"rank_pattern": {narrow: 3, wide: 5}, "alpha_pattern": {narrow: 9, wide: 10}}
    folder = write_adapter(model, tmp_path, target_modules=["q_proj", "v_proj"], r=2, lora_alpha=2, **patterns)
    assert list(json.loads((folder / "adapter_config.json").read_text())["rank_pattern"]) == [wide, narrow]
    stored = load_file(folder / "adapter_model.safetensors")
    with caplog.at_level(logging.WARNING, "chairlift"):
        matrices = read_lora_adapter(str(folder), declare(model), 8)
    for layer, name, scale in ((1, "q_proj", 3), (1, "v_proj", 2), (0, "q_proj", 2)):
        a, b = matrices[f"model.layers.{layer}.self_attn.{name}"]
        assert len(a) == (3 if scale == 3 else 5)
        raw = stored[f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_B.weight"]
        torch.testing.assert_close(b.t(), scale * raw)
    (message,) = caplog.messages
    found = "the tensors of 1 module, such as model.layers.1.self_attn.q_proj (rank 3 instead of 5)"
    assert found in message


def test_adapters_of_experts_are_rejected(model: Path, tmp_path: Path, tiny_model_dir: Callable[..., Path]) -> None:
    folder = tiny_model_dir("qwen3_moe")
    adapter = write_adapter(folder, tmp_path / "moe", target_modules=["q_proj"], r=2, lora_alpha=2)
    assert all(name.endswith("q_proj") for name in read_lora_adapter(str(adapter), declare(folder), 16))
    experts = next(layer.mixture for layer in declare(folder).layers if layer.mixture is not None)
    assert experts.router is not None
    name = experts.router.matrix.parts[0][0]
    pair = {f"base_model.model.{name}.lora_{kind}.weight": torch.ones(2, 2) for kind in "AB"}
    change_tensors(adapter, {**pair})
    with pytest.raises(ModelLoadError, match="is a matrix of the group 'router'"):
        read_lora_adapter(str(adapter), declare(folder), 16)


@pytest.mark.parametrize("name", ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"])
def test_adapters_of_divided_matrices_are_rejected(
    name: str, model: Path, adapter: Path, tiny_model_dir: Callable[..., Path]
) -> None:
    pair = {f"{LAYER}.self_attn.{name}.lora_{kind}.weight": torch.ones(2, 2) for kind in "AB"}
    save_file(pair, adapter / "adapter_model.safetensors")
    reason = "group 'attention', which latent attention computes in several parts"
    allowed = "mlp.down_proj, mlp.gate_proj, .*, self_attn.o_proj, self_attn.q_a_proj: train the adapter without"
    with pytest.raises(ModelLoadError, match=f"{name} is a matrix of the {reason}; .* are supported in {allowed}"):
        read_lora_adapter(str(adapter), declare(tiny_model_dir("deepseek_v3")), 16)


def test_ranks_and_files(model: Path, adapter: Path) -> None:
    config = declare(model)
    with pytest.raises(ModelLoadError, match="has rank 4, but max_lora_rank=3: increase --max-lora-rank to at least 4"):
        read_lora_adapter(str(adapter), config, 3)
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors cannot be read"):
        read_lora_adapter(str(adapter), config, 16)
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match=r"adapter_model\.bin can run code and is not read"):
        read_lora_adapter(str(adapter), config, 16)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="is not valid JSON"):
        read_lora_adapter(str(adapter), config, 16)
    with pytest.raises(ModelLoadError, match=r"a LoRA adapter is a folder with adapter_config\.json"):
        read_lora_adapter(str(adapter / "missing"), config, 16)


@pytest.mark.parametrize("path", ["~nosuchuser/adapter", "a\0b", "\ud800", "/dev", "x" * 5000])
def test_paths_that_are_no_folder(path: str, model: Path) -> None:
    with pytest.raises(ModelLoadError):
        read_lora_adapter(path, declare(model), 16)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_or_a_device_is_not_opened(name: str, model: Path, adapter: Path) -> None:
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    with pytest.raises(ModelLoadError, match=r"not a (regular )?file"):
        read_lora_adapter(str(adapter), declare(model), 16)
    (adapter / name).unlink()
    (adapter / name).symlink_to("/dev/zero")
    with pytest.raises(ModelLoadError, match=r"not a (regular )?file"):
        read_lora_adapter(str(adapter), declare(model), 16)
