"""Safetensors folders written by transformers, and errors for damaged ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from chairlift.errors import ModelLoadError
from chairlift.loading.resolve import resolve_model
from chairlift.loading.safetensors_weights import INDEX, SafetensorsWeights
from support.case_loop import loop_over
from support.tiny_models import architectures_with

CPU = torch.device("cpu")
TinyModelDir = Callable[..., Path]


def open_folder(folder: Path, dtype: torch.dtype = torch.float32) -> SafetensorsWeights:
    files = resolve_model(str(folder))
    weights = files.weights(files.config(), dtype, CPU)
    assert isinstance(weights, SafetensorsWeights)
    return weights


@pytest.fixture
def copy(tiny_model_dir: TinyModelDir, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies a tiny model, so that a test can damage it."""

    def make(arch: str = "llama", **options: Any) -> Path:
        return Path(shutil.copytree(tiny_model_dir(arch, **options), tmp_path / "model"))

    return make


@pytest.mark.parametrize("arch", architectures_with("tensors"))
@loop_over("max_shard_size", ["1GB", "40KB"])
def test_every_tensor_is_read(tiny_model_dir: TinyModelDir, arch: str, max_shard_size: str) -> None:
    """Files hold each expert or all of them in one tensor, and models of transformers have other names for them.

    Rows of ERNIE 4.5 and Cohere are reordered, and latent attention has several parameters in one tensor.
    `test_models_parity.py` compares the values that every architecture reads.
    """
    folder = tiny_model_dir(arch, max_shard_size=max_shard_size)
    assert (folder / INDEX).exists() is (max_shard_size == "40KB")
    weights = open_folder(folder)
    num_values = sum(
        weights.tensor(name, (out_features, matrix.in_features)).numel()
        for matrix in weights.config.matrices
        for name, (_, out_features) in zip(matrix.weight_names, matrix.parts, strict=True)
    )
    stored = [load_file(file) for file in folder.glob("*.safetensors")]
    matrices = {
        name: each
        for file in stored
        for name, each in file.items()
        if each.ndim > 1 and not re.search("bias|conv.conv|conv1d|A_log", name)
    }
    assert num_values == sum(tensor.numel() for tensor in matrices.values())
    assert all(re.search(r"norm|scal|bias|sinks|conv|A_log", name) for name in weights.unused())


def test_a_convolution_in_parts_of_any_size(copy: Callable[..., Path]) -> None:
    """transformers 5.24 saves equal thirds; the published files have the widths of q, k and v."""
    folder = copy("olmo_hybrid")
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    names = [f"model.layers.0.linear_attn.{part}_conv1d.weight" for part in "qkv"]
    assert [len(tensors[name]) for name in names] == [48, 48, 48]
    whole = torch.cat([tensors[name] for name in names])
    parts = whole.split([32, 32, 80])
    for kept, rows in ((whole, tensors), (whole, dict(zip(names, parts, strict=True))), (None, {names[2]: parts[0]})):
        save_file({**tensors, **{name: rows[name].contiguous() for name in names if name in rows}}, path)
        weights = open_folder(folder)
        if kept is not None:
            assert torch.equal(weights.tensor("model.layers.0.linear_attn.conv1d.weight", (144, 1, 4)), kept)
            assert not set(names) & set(weights.unused())
    with pytest.raises(ModelLoadError, match=r"v_conv1d.weight have 128 rows together, .* requires 144; use the conf"):
        weights.tensor("model.layers.0.linear_attn.conv1d.weight", (144, 1, 4))


@pytest.mark.parametrize("arch", architectures_with("names"))
@loop_over("max_shard_size", ["1GB", "40KB"])
def test_tensors_equal_the_state_dict(tiny_model_dir: TinyModelDir, arch: str, max_shard_size: str) -> None:
    folder = tiny_model_dir(arch, max_shard_size=max_shard_size)
    assert (folder / INDEX).exists() is (max_shard_size == "40KB")
    weights = open_folder(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in model.state_dict())
    for name, parameter in (*model.named_parameters(), *buffers):
        assert torch.equal(weights.tensor(name, tuple(parameter.shape)), parameter.detach()), name
    assert weights.unused() == []


def test_dtype_is_converted(tiny_model_dir: TinyModelDir) -> None:
    folder = tiny_model_dir("llama")
    ours = open_folder(folder, torch.bfloat16).tensor("lm_head.weight", (256, 64))
    stored = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, stored.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_packed_rows_keep_their_type(copy: Callable[..., Path], dtype: torch.dtype) -> None:
    """float64 has no packed format and is converted to float32."""
    folder, name = copy(), "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, folder / "model.safetensors")
    weights = open_folder(folder)
    packed = weights.packed(name, (96, 64))
    assert packed.format == {torch.bfloat16: "bf16", torch.float16: "f16"}.get(dtype, "f32")
    assert torch.equal(torch.from_numpy(packed.to_floats(packed.rows[5:9])), tensors[name][5:9].float())
    assert name not in weights.unused()
    with pytest.raises(ModelLoadError, match=r"up_proj\.weight has the shape \(96, 64\)"):
        weights.packed(name, (96, 32))


def test_unused_omits_recomputed_tensors(copy: Callable[..., Path]) -> None:
    folder = copy("llama", tie_word_embeddings=True)
    file = folder / "model.safetensors"
    own = load_file(file)["model.embed_tokens.weight"].clone()
    extra = {"lm_head.weight": own, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    extra["embeddings.position_ids"] = torch.arange(2)  # as in bge-small-en-v1.5, all-MiniLM-L6-v2 and others
    save_file({**load_file(file), **extra, "surprise": torch.ones(2)}, file)
    weights = open_folder(folder)
    weights.checked()
    config = weights.config
    weights.tensor("model.norm.weight", (config.hidden_size,))
    assert "surprise" in weights.unused()
    assert "model.norm.weight" not in weights.unused()
    assert not any(re.search("inv_freq|lm_head|position_ids", name) for name in weights.unused())


@pytest.mark.parametrize("keep", [0, 4, 100, 3000, -1])
def test_error_names_a_truncated_file(copy: Callable[..., Path], keep: int) -> None:
    file = copy() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: cannot be read .*truncated or damaged"):
        open_folder(file.parent)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": "../../secret.safetensors"}}',
        '{"weight_map": {"a": "pytorch_model.bin"}}',
    ],
)
def test_error_names_a_damaged_index(copy: Callable[..., Path], text: str) -> None:
    folder = copy(max_shard_size="40KB")
    (folder / INDEX).write_text(text)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json: weight_map"):
        open_folder(folder)


def test_index_that_contradicts_its_shards_is_an_error(copy: Callable[..., Path]) -> None:
    folder = copy(max_shard_size="40KB")
    index = json.loads((folder / INDEX).read_text())
    shard = next(iter(index["weight_map"].values()))
    index["weight_map"]["model.not.there"] = shard
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"tensor model\.not\.there is not in model-000\d\d"):
        open_folder(folder)


def test_folder_without_weights_is_an_error(copy: Callable[..., Path]) -> None:
    folder = copy()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"contains neither model\.safetensors nor .*--load-format dummy"):
        open_folder(folder)
