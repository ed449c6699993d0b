"""Allocation of KV memory: errors for too much memory, and the number of threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from chairlift import LLM, EngineConfig
from chairlift.engine.startup import loaded_model, threads
from chairlift.errors import ConfigError
from chairlift.models.decoder import DecoderModel
from chairlift.system.control_groups import ControlGroups
from chairlift.system.cpu_topology import CpuTopology
from support.native import needs_native


def allocate_with(monkeypatch: pytest.MonkeyPatch, allocate: Callable[[], object]) -> None:
    """Replace the model's allocation by `allocate`, on a machine with unlimited memory."""
    monkeypatch.setattr(DecoderModel, "allocate_kv_cache", lambda *_arguments: allocate())
    monkeypatch.setattr(loaded_model, "total_memory", lambda _device: 1 << 60)


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("option", ["num_kv_blocks", "kv_cache_memory_bytes"])
@pytest.mark.parametrize(
    ("allocate", "words"),
    [
        (lambda: np.zeros(1 << 55, np.uint8), r"Unable to allocate 32\.0 PiB"),
        (lambda: torch.zeros(1 << 55, dtype=torch.uint8), r"DefaultCPUAllocator: .* memory"),
        (lambda: fail(torch.OutOfMemoryError("CUDA out of memory")), "CUDA out of memory"),
    ],
    ids=["numpy", "torch", "device"],
)
def test_a_failed_allocation_raises_an_error_with_the_size(
    tiny_model_dir: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    allocate: Callable[[], object],
    words: str,
) -> None:
    allocate_with(monkeypatch, allocate)
    config = EngineConfig(str(tiny_model_dir("llama")), skip_tokenizer_init=True, **{option: 10 << 20})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"which cannot be allocated \(.*{words}.*\): lower {option}"):
        LLM.from_config(config)


def test_other_errors_are_not_reported_as_out_of_memory(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate_with(monkeypatch, lambda: torch.zeros(2, 3) @ torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        LLM(str(tiny_model_dir("llama")), skip_tokenizer_init=True, num_kv_blocks=60)


def test_a_pool_larger_than_the_memory_is_rejected_before_allocation(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_model, "total_memory", lambda _device: 1 << 20)
    with pytest.raises(
        ConfigError, match=r"takes .* MiB, more than the 1 MiB that this process may use: lower num_kv_blocks"
    ):
        LLM(str(tiny_model_dir("llama")), skip_tokenizer_init=True, num_kv_blocks=6000)


def test_a_pool_larger_than_the_control_group_limit_is_rejected(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ControlGroups, "memory_limit", lambda _self: 1 << 20)
    with pytest.raises(ConfigError, match=r"more than the 1 MiB that this process may use: lower num_kv_blocks"):
        LLM(str(tiny_model_dir("llama")), skip_tokenizer_init=True, num_kv_blocks=6000)


def test_a_pool_larger_than_the_free_memory_logs_a_warning(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ControlGroups, "memory_available", lambda _self: 4096)
    with caplog.at_level(logging.WARNING, "chairlift"):
        LLM(str(tiny_model_dir("llama")), skip_tokenizer_init=True, num_kv_blocks=60).close()
    assert "when it is full, but only 4 KiB are free now" in caplog.text


@pytest.mark.parametrize(
    ("quota", "num_threads"), [(None, 8), (0.3, 1), (1.0, 1), (1.9, 1), (2.0, 2), (7.99, 7), (8.0, 8), (64.0, 8)]
)
def test_the_number_of_threads_is_limited_by_the_cpu_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, num_threads: int
) -> None:
    monkeypatch.setattr(threads, "allowed_cpus", lambda: set(range(16)))
    monkeypatch.setattr(CpuTopology, "num_physical_cores", lambda _self, cpus: len(cpus) // 2)
    monkeypatch.setattr(ControlGroups, "cpu_quota", lambda _self: quota)
    assert threads.default_num_threads() == num_threads


@needs_native
@pytest.mark.parametrize(
    ("nodes", "num_threads", "is_logged"), [([0, 2], 2, True), ([0, 2], 1, False), ([1], 2, False)]
)
def test_an_engine_on_several_numa_nodes_logs_how_to_place_its_memory(
    nodes: list[int],
    num_threads: int,
    is_logged: bool,
    tiny_model_dir: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(CpuTopology, "numa_nodes", lambda _self, _cpus: nodes)
    with caplog.at_level(logging.WARNING, "chairlift"):
        loaded_model.load_model(
            EngineConfig(str(tiny_model_dir("llama")), num_threads=num_threads, skip_tokenizer_init=True)
        )
    assert ("are on 2 NUMA nodes (0, 2)" in caplog.text) == is_logged
