"""Layers whose calls are repeated from a tape give the bits of layers that Python calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from chairlift.kernels.backend import RotaryStep
from chairlift.kernels.cpu import tape
from chairlift.loading.resolve import ModelFiles, load_config, open_weights
from chairlift.models.llama import LlamaLayer, LlamaModel
from chairlift.models.registry import build_model
from native import needs_native
from packed_steps import Tables, pack

pytestmark = needs_native

CPU = torch.device("cpu")
# (sequence, first token, end) of each step: prompts, decodes of three and two rows in turns, a prompt that needs larger
# buffers than all before, and the same decodes again.
STEPS = [
    [(0, 0, 20), (1, 0, 1), (2, 0, 9)],
    *([(0, 20 + i, 21 + i), (1, 1 + i, 2 + i), (2, 9 + i, 10 + i)] for i in range(4)),
    *([(0, 24 + i, 25 + i), (2, 13 + i, 14 + i)] for i in range(3)),
    [(3, 0, 90)],
    *([(0, 27 + i, 28 + i), (2, 16 + i, 17 + i)] for i in range(3)),
]

RECORDED = [30, 3, 2, 90, 2, 30, 3, 2, 90]


def make(folder: Path, kv_cache_dtype: torch.dtype) -> LlamaModel:
    files = ModelFiles("hf", folder, "tiny")
    config = load_config(files)
    weights = open_weights(files, config, torch.float32, CPU)
    model = build_model(
        config,
        weights,
        attention_backend="native",
        dtype=torch.float32,
        device="cpu",
        kv_cache_dtype=kv_cache_dtype,
        quantization="q8_0",
    )
    assert isinstance(model, LlamaModel)
    return model


@torch.inference_mode()
def run(model: LlamaModel) -> Iterator[torch.Tensor]:
    """The logits of each step, from fresh KV memory on."""
    draw, tables = random.Random(0), Tables(64, 8)
    model.allocate_kv_cache(64, 8)
    for work in STEPS:
        step = pack(tables, work)
        ids = torch.tensor(
            [draw.randrange(model.config.vocab_size) for _, start, stop in work for _ in range(start, stop)]
        )
        yield model.logits(model.forward(ids, step.positions, model.plan(step.metadata))).clone()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of a layer from Python."""
    rows: list[int] = []
    plain = LlamaLayer.__call__

    def called(self: LlamaLayer, x: torch.Tensor, rotary: RotaryStep, plan: object) -> torch.Tensor:
        rows.append(len(x))
        return plain(self, x, rotary, plan)

    monkeypatch.setattr(LlamaLayer, "__call__", called)
    return rows


@pytest.mark.parametrize("kv_cache_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen3"])
def test_a_tape_gives_the_bits_of_calls(
    arch: str,
    kv_cache_dtype: torch.dtype,
    tiny_model_dir: Callable[..., Path],
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_model_dir(arch)
    with monkeypatch.context() as patch:
        patch.setattr(tape, "MAX_ROWS", 0)
        expected = list(run(make(folder, kv_cache_dtype)))
    calls.clear()
    model = make(folder, kv_cache_dtype)
    for _ in range(2):  # the second time in other KV memory
        for ours, theirs in zip(run(model), expected, strict=True):
            assert torch.equal(ours, theirs)
    # Recorded: once for each number of rows, again where buffers have moved, and again in other KV memory.
    once = len(model.layers)
    assert calls == [rows for rows in RECORDED for _ in range(once)]


def test_a_step_that_fails_is_not_repeated(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = (make(tiny_model_dir("llama"), torch.bfloat16) for _ in range(2))
    plain = LlamaLayer.__call__

    def fail(self: LlamaLayer, x: torch.Tensor, rotary: RotaryStep, plan: object) -> torch.Tensor:
        if self is model.layers[-1]:
            raise RuntimeError("no")
        return plain(self, x, rotary, plan)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaLayer, "__call__", fail)
        with pytest.raises(RuntimeError, match="no"):
            next(run(model))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(run(model), run(other), strict=True))
