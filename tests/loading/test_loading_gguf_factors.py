"""Matrices of GGUF files with a factor in a tensor of its own, which llama.cpp's converter writes for NVFP4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from chairlift.errors import ModelLoadError
from chairlift.loading.gguf_weights import GGUFWeights
from chairlift.loading.resolve import resolve_model
from support.gguf_files import HIDDEN, INTERMEDIATE, write_gguf

Q = gguf.GGMLQuantizationType
UP, GATE = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
SHAPE = (INTERMEDIATE, HIDDEN)
CPU = torch.device("cpu")


def nvfp4_blocks() -> tuple[Any, Any]:
    """Return random blocks of 64 inputs with all bytes as scales, and their values by the definition of ggml."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (INTERMEDIATE, 36), dtype=np.uint8)
    blocks[:64, :4] = np.arange(256, dtype=np.uint8).reshape(64, 4)
    scales, pairs = blocks[:, :4], blocks[:, 4:].reshape(-1, 4, 8)
    floats = torch.from_numpy(scales & 0x7F).view(torch.float8_e4m3fn).float().numpy()  # The sign is ignored,
    floats = np.where(scales == 0x7F, 0, np.where(scales == 0xFF, 480, floats))  # and NaN is 0, or 480 with a sign.
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.concatenate((pairs & 15, pairs >> 4), axis=2)
    values = np.concatenate((table, -table))[numbers] * floats[..., None]
    return blocks, values.reshape(SHAPE).astype(np.float32)


def open_weights(path: Path) -> GGUFWeights:
    files = resolve_model(str(path))
    weights = files.weights(files.config(), torch.float32, CPU)
    assert isinstance(weights, GGUFWeights)
    return weights


def test_nvfp4_has_the_values_of_its_blocks_times_the_factor(tmp_path: Path) -> None:
    blocks, values = nvfp4_blocks()
    vectors = {"blk.0.ffn_up.scale": torch.tensor([0.37]), "blk.0.ffn_up.input_scale": torch.tensor([0.02])}
    rows = {"blk.0.ffn_up.weight": (Q.NVFP4, blocks), "blk.0.ffn_gate.weight": (Q.NVFP4, blocks)}
    path = write_gguf(tmp_path / "model.gguf", vectors, blocks=rows)
    weights, source = open_weights(path), resolve_model(str(path))
    for name, factor in ((UP, np.float32(0.37)), (GATE, np.float32(1))):
        packed = weights.packed(name, SHAPE)
        assert packed.format == "nvfp4" == source.formats(source.config())(name)
        assert np.array_equal(packed.to_floats(packed.rows), values * factor)
        assert np.array_equal(packed.to_floats(packed.rows[5:7]), values[5:7] * factor)
        assert np.array_equal(weights.tensor(name, SHAPE).numpy(), values * factor)
    assert weights.unused() == []
    assert weights.notes() == ["skipped 1 tensors *.input_scale: only weights are quantized as in the file"]


@pytest.mark.parametrize("kind", [Q.F32, Q.Q8_0])
def test_matrices_of_other_types_with_a_factor_become_floats(kind: Any, tmp_path: Path) -> None:
    values = torch.randn(SHAPE)
    tensors = {"blk.0.ffn_up.weight": values, "blk.0.ffn_up.scale": torch.tensor([2.0])}
    path = write_gguf(tmp_path / "model.gguf", tensors, quantization=kind)
    expected = 2 * gguf.dequantize(gguf.quantize(values.numpy(), kind), kind)
    weights, source = open_weights(path), resolve_model(str(path))
    packed = weights.packed(UP, SHAPE)
    assert packed.format == "f32" == source.formats(source.config())(UP)
    assert np.array_equal(packed.to_floats(packed.rows), expected)
    assert np.array_equal(weights.tensor(UP, SHAPE).numpy(), expected)


@pytest.mark.parametrize("factor", [[1.0, 2.0], [float("nan")]])
def test_errors_name_a_wrong_factor(factor: list[float], tmp_path: Path) -> None:
    tensors = {"blk.0.ffn_up.weight": torch.randn(SHAPE), "blk.0.ffn_up.scale": torch.tensor(factor)}
    weights = open_weights(write_gguf(tmp_path / "model.gguf", tensors))
    with pytest.raises(ModelLoadError, match=r"tensor blk\.0\.ffn_up\.scale must have 1 finite numbers"):
        weights.tensor(UP, SHAPE)


def test_a_factor_without_a_matrix_is_an_error(tmp_path: Path) -> None:
    weights = open_weights(write_gguf(tmp_path / "model.gguf", {"blk.0.ffn_up.scale": torch.tensor([2.0])}))
    assert weights.unused() == ["blk.0.ffn_up.scale"]
