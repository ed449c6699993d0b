"""Native kernels in every format against the reference kernels over the same rounded weights."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.config import QUANTIZATIONS
from chairlift.kernels.cpu import load
from chairlift.kernels.weights import PackedRows, Weights, packed_tensor
from chairlift.loading.model_source import FolderSource
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.decoder import DecoderModel, build_model
from support.case_loop import loop_over
from support.native import ROUNDING_TO_BF16, needs_native
from support.packed_steps import Tables, pack

pytestmark = needs_native

CPU = torch.device("cpu")
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ODD_SIZES = {"hidden_size": 72, "head_dim": 12, "intermediate_size": 100, "vocab_size": 259}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama3, biases": ("llama3", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 40}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": False}),
    "opt": ("opt", {"word_embed_proj_dim": 32}),
    "opt, norm after": ("opt", {"do_layer_norm_before": False}),
    "sizes that are no multiples": (
        "llama",
        {"hidden_size": 72, "head_dim": 12, "intermediate_size": 100, "vocab_size": 259},
    ),
}
PROMPTS = {0: 53, 1: 1, 2: 30}


class Rounded:
    """A `Weights` with every matrix rounded to a format, both packed and as a tensor.

    Args:
        routers: the names of the matrices that are not rounded to integers.
    """

    def __init__(self, weights: Weights, name: str, routers: Collection[str]) -> None:
        self._weights = weights
        self._format = name
        self._routers = routers

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._weights.tensor(name, shape)
        if len(shape) == 1 or "embed_positions" in name or (name in self._routers and self._format not in FLOATS):
            return tensor
        if self._format in FLOATS:
            return tensor.to(FLOATS[self._format]).float()
        matrix = load().PackedMatrix(self._format, *shape)
        matrix.pack_floats(0, tensor.numpy())
        return torch.from_numpy(matrix.unpack(0, shape[0]))

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows:
        tensor = self._weights.tensor(name, shape)
        return packed_tensor(tensor.to(FLOATS.get(self._format, torch.float32)))


def both(folder: Path, name: str, kv_cache_dtype: torch.dtype) -> tuple[ModelConfig, DecoderModel, DecoderModel]:
    files = FolderSource(folder, "tiny")
    config = files.config()
    routers = {kept for matrix in config.matrices if matrix.keeps_format for kept in matrix.weight_names}
    weights = Rounded(files.weights(config, torch.float32, CPU), name, routers)
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "kv_cache_dtype": kv_cache_dtype}
    quantization = name if name in QUANTIZATIONS else None
    native = build_model(config, weights, kernels="native", quantization=quantization, **options)
    return config, native, build_model(config, weights, kernels="reference", **options)


@torch.inference_mode()
def logits(model: DecoderModel, vocab_size: int) -> torch.Tensor:
    """Compute three prompts together in two chunks, and then one token of each: [T, V]."""
    draw, tables = random.Random(0), Tables(64, 8)
    model.allocate_kv_cache(64, 8)
    tokens = {sequence: [draw.randrange(vocab_size) for _ in range(length + 1)] for sequence, length in PROMPTS.items()}
    rows = []
    for cut in (0.0, 0.4, 1.0):
        work = [(s, int(cut * n), int(0.4 * n) if cut == 0 else n if cut < 1 else n + 1) for s, n in PROMPTS.items()]
        work = [span for span in work if span[2] > span[1]]
        step = pack(tables, work)
        ids = torch.tensor([token for s, start, stop in work for token in tokens[s][start:stop]])
        hidden = model.forward(ids, step.positions, model.plan(step.metadata))
        rows.append(model.logits(hidden).clone())
    return torch.cat(rows)


@pytest.mark.parametrize("case", ARCHITECTURES)
@loop_over("name", FLOATS)
def test_float_formats(case: str, name: str, tiny_model_dir: Callable[..., Path]) -> None:
    arch, overrides = ARCHITECTURES[case]
    config, native, reference = both(tiny_model_dir(arch, **overrides), name, torch.float32)
    ours, expected = logits(native, config.vocab_size), logits(reference, config.vocab_size)
    if name == "bf16" and load().isa() in ROUNDING_TO_BF16:
        assert typical_error(config, ours, expected) < 0.015
    else:
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("case", ARCHITECTURES)
@loop_over("name", QUANTIZATIONS)
def test_quantized_formats(case: str, name: str, tiny_model_dir: Callable[..., Path]) -> None:
    """Both kernel sets use the same weights; only native kernels round activations to 8 bits."""
    arch, overrides = ARCHITECTURES[case]
    config, native, reference = both(tiny_model_dir(arch, **overrides), name, torch.float32)
    ours, expected = logits(native, config.vocab_size), logits(reference, config.vocab_size)
    assert typical_error(config, ours, expected) < 0.06


@pytest.mark.parametrize("case", ARCHITECTURES)
@loop_over(("kv_cache_dtype", "bound"), [(torch.bfloat16, 0.01), (torch.int8, 0.03)])
def test_int8_and_bfloat16_kv_memory(
    case: str, kv_cache_dtype: torch.dtype, bound: float, tiny_model_dir: Callable[..., Path]
) -> None:
    """Both kernel sets round K and V in the same way, up to the last bit."""
    arch, overrides = ARCHITECTURES[case]
    config, native, reference = both(tiny_model_dir(arch, **overrides), "f32", kv_cache_dtype)
    ours, expected = logits(native, config.vocab_size), logits(reference, config.vocab_size)
    assert typical_error(config, ours, expected) < bound


def typical_error(config: ModelConfig, ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error of all rows; of models with experts that of the median row, because rounding may change the
    choice of an expert."""
    if all(layer.feed_forward.router is None for layer in config.layers):
        return relative_error(ours, expected)
    return statistics.median(relative_error(*row) for row in zip(ours, expected, strict=True))


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours - expected).square().mean().sqrt() / expected.square().mean().sqrt())
