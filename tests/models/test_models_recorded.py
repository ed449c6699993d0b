"""Layers that are replayed from a recording compute the same bits as layers that Python calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift.kernels.attention import AttentionMetadata, StepContext
from chairlift.kernels.cpu import load, tape
from chairlift.loading.model_source import FolderSource
from chairlift.models.decoder import DecoderLayer, DecoderModel, build_model
from chairlift.models.kv_layout import KVLayout
from support.native import needs_native
from support.packed_steps import Tables, pack
from support.tiny_models import architectures_with

pytestmark = needs_native

CPU = torch.device("cpu")
# (sequence, first token, end) of each step: prompts, decodes of three rows, other steps of three rows, decodes of two,
# a prompt that needs larger buffers than all before, and the same decodes again.
STEPS = [
    [(0, 0, 20), (1, 0, 1), (2, 0, 9)],
    *([(0, 20 + i, 21 + i), (1, 1 + i, 2 + i), (2, 9 + i, 10 + i)] for i in range(4)),
    [(4, 0, 3)],
    [(5, 0, 2), (1, 5, 6)],
    [(1, 6, 7), (4, 3, 4), (5, 2, 3)],
    *([(0, 24 + i, 25 + i), (2, 13 + i, 14 + i)] for i in range(3)),
    [(3, 0, 90)],
    *([(0, 27 + i, 28 + i), (2, 16 + i, 17 + i)] for i in range(3)),
]

RECORDED = [30, 3, 2, 90, 2, 30, 3, 2, 90]


def make(folder: Path, kv_cache_dtype: torch.dtype) -> DecoderModel:
    files = FolderSource(folder, "tiny")
    config = files.config()
    weights = files.weights(config, torch.float32, CPU)
    model = build_model(
        config,
        weights,
        kernels="native",
        dtype=torch.float32,
        device="cpu",
        kv_cache_dtype=kv_cache_dtype,
        quantization="q8_0",
    )
    assert isinstance(model, DecoderModel)
    return model


class Run:
    """Consecutive steps of a model, starting with empty KV memory. Each group of layers has 64 blocks of its own."""

    def __init__(self, model: DecoderModel) -> None:
        self._model, self._draw, self._tables = model, random.Random(0), Tables(64, 8)
        layout = KVLayout.by_window(model.config, model.config.max_position_embeddings)
        self._num_groups = len(layout.windows)
        model.allocate_kv_cache(64 * self._num_groups, 8, layout)

    @torch.inference_mode()
    def step(self, work: list[tuple[int, int, int]]) -> torch.Tensor:
        """Compute the logits of all rows for the next random tokens."""
        model, step = self._model, pack(self._tables, work)
        tokens = [self._draw.randrange(model.config.vocab_size) for _, start, stop in work for _ in range(start, stop)]
        hidden = model.forward(torch.tensor(tokens), step.positions, self.plan(step.metadata))
        return model.logits(hidden).clone()

    def plan(self, metadata: AttentionMetadata) -> Any:
        tables, slots = metadata.block_tables, metadata.slot_mapping
        groups = ((64 * group, 64 * 8 * group) for group in range(self._num_groups))
        return self._model.plan(
            *(replace(metadata, block_tables=tables + block, slot_mapping=slots + slot) for block, slot in groups)
        )


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = load().num_threads()
    yield
    load().set_num_threads(before)
    load().set_tile_order(0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of rows in each call of a layer from Python."""
    rows: list[int] = []
    plain = DecoderLayer.__call__

    def called(self: DecoderLayer, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        rows.append(len(x))
        return plain(self, x, step)

    monkeypatch.setattr(DecoderLayer, "__call__", called)
    return rows


@pytest.mark.parametrize("kv_cache_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("arch", architectures_with("recorded"))
def test_recorded_steps_equal_python_calls_bit_for_bit(
    arch: str,
    kv_cache_dtype: torch.dtype,
    tiny_model_dir: Callable[..., Path],
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tiny_model_dir(arch)
    with monkeypatch.context() as patch:
        patch.setattr(tape, "MAX_ROWS", 0)
        plain = Run(make(folder, kv_cache_dtype))
        expected = [plain.step(work) for work in STEPS]
    calls.clear()
    model = make(folder, kv_cache_dtype)
    for _ in range(2):  # the second time in other KV memory
        run = Run(model)
        for index, work in enumerate(STEPS):
            load().set_num_threads(1 + index % 2)
            load().set_tile_order(index)
            assert torch.equal(run.step(work), expected[index])
    # Recorded: once for each number of rows, again where buffers have moved, and again in other KV memory.
    assert calls == [rows for rows in RECORDED for _ in model.layers]


def test_failed_step_is_not_recorded(
    tiny_model_dir: Callable[..., Path], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = (make(tiny_model_dir("llama"), torch.bfloat16) for _ in range(2))
    run, plain = Run(model), Run(other)
    for work in STEPS[:2]:
        assert torch.equal(run.step(work), plain.step(work))
    through = DecoderLayer.__call__

    def fail(self: DecoderLayer, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        if self is model.layers[-1]:
            raise RuntimeError("no")
        return through(self, x, step)

    two = [(0, 21, 22), (2, 10, 11)]
    with monkeypatch.context() as patch:
        patch.setattr(DecoderLayer, "__call__", fail)
        for each in (run, plain):
            with pytest.raises(RuntimeError, match="no") if each is run else nullcontext():
                each.step(two)
    calls.clear()
    assert torch.equal(run.step(two), plain.step(two))
    assert calls == [2] * len(model.layers), "the failed step left no tape"
    calls.clear()
    assert torch.equal(run.step(two), plain.step(two))
    assert not calls


def test_recorded_attention_needs_the_steps_of_the_recording(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tape, "MAX_ROWS", 0)
    run, recording = Run(make(tiny_model_dir("llama"), torch.bfloat16)), load().Tape()
    with pytest.raises(ValueError, match="one of those that"), tape.record_calls(recording):
        run.step([(0, 0, 2)])
    (plan,) = run.plan(pack(Tables(64, 8), [(0, 0, 2)]).metadata).attention
    with pytest.raises(ValueError, match="steps must have 0 items, as recorded, got 1"):
        recording.replay([plan.step], 0)
