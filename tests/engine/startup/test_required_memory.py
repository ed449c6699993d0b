"""Tests the plan of an engine's memory before it is started."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import LoadedDecoder, load_model
from chairlift.engine.startup.required_memory import PROCESS_BYTES, SERVER_PROCESSES_BYTES, plan_required_memory
from chairlift.errors import ConfigError, ModelLoadError
from chairlift.loading.gguf_file import GGUFFile
from support.parameter_memory import parameter_bytes
from support.pooling_models import write_pooling_model


@pytest.mark.parametrize("max_loras", [0, 3])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_plan_is_what_the_engine_takes(kernels: str, max_loras: int, tiny_model_dir: Callable[..., Path]) -> None:
    lora = {"max_loras": max_loras, "max_lora_rank": 5} if max_loras else {}
    options: dict[str, Any] = {"kernels": kernels, **lora}
    given = EngineConfig(str(tiny_model_dir("llama")), skip_tokenizer_init=True, num_threads=1, **options)
    config, required = plan_required_memory(given, PROCESS_BYTES + (16 << 20))
    engine = build_engine(config)
    assert required.weights == parameter_bytes(engine.loaded.model)
    assert required.kv_cache == engine.facts.kv_cache_plan.num_bytes
    assert required.total <= PROCESS_BYTES + (16 << 20)


@pytest.mark.parametrize("arch", ["granite4_h", "qwen3_5", "lfm2"])
def test_the_parameters_of_recurrences_are_in_the_plan(arch: str, tiny_model_dir: Callable[..., Path]) -> None:
    given = EngineConfig(str(tiny_model_dir(arch)), skip_tokenizer_init=True, num_threads=1, max_num_seqs=2)
    config, required = plan_required_memory(given, PROCESS_BYTES + (64 << 20))
    assert required.weights == parameter_bytes(build_engine(config).loaded.model)


@pytest.mark.parametrize(("arch", "draft"), [("llama", "llama"), ("granite4_h", "lfm2")])
def test_a_draft_model_is_in_the_plan(arch: str, draft: str, tiny_model_dir: Callable[..., Path]) -> None:
    given = EngineConfig(
        str(tiny_model_dir(arch)),
        skip_tokenizer_init=True,
        num_threads=1,
        max_num_seqs=2,
        speculative_config={"model": str(tiny_model_dir(draft))},
    )
    config, required = plan_required_memory(given, PROCESS_BYTES + (64 << 20))
    engine = build_engine(config)
    assert isinstance(engine.loaded, LoadedDecoder)
    assert engine.loaded.draft is not None
    models = engine.loaded.model, engine.loaded.draft.model
    assert required.weights == sum(map(parameter_bytes, models))
    assert required.kv_cache == engine.facts.kv_cache_plan.num_bytes
    _, alone = plan_required_memory(replace(given, speculative_config=None), PROCESS_BYTES + (64 << 20))
    assert required.activations > alone.activations


def test_the_metadata_of_a_gguf_file_is_released(smollm2_gguf: Path) -> None:
    def num_open() -> int:
        return sum(isinstance(each, GGUFFile) for each in gc.get_objects())

    gc.collect()
    before, config = num_open(), EngineConfig(str(smollm2_gguf), num_kv_blocks=10)
    plan_required_memory(config, 1 << 30)
    assert num_open() == before
    loaded = load_model(config)
    assert num_open() == before, "weights are copied"
    assert loaded.files == [smollm2_gguf]


def test_the_size_of_the_pool_may_be_given(tiny_model_dir: Callable[..., Path]) -> None:
    given = EngineConfig(str(tiny_model_dir("llama")), num_kv_blocks=10)
    config, required = plan_required_memory(given, 1)
    assert config == given
    assert required.total > required.kv_cache > 0


def test_too_little_memory_is_an_error_with_the_numbers(tiny_model_dir: Callable[..., Path]) -> None:
    given = EngineConfig(str(tiny_model_dir("llama")))
    with pytest.raises(
        ConfigError,
        match=r"models_memory_bytes=200 MiB for model 'tiny_.*' leaves nothing for K and V: the weights take",
    ):
        plan_required_memory(given, 200 << 20)
    with pytest.raises(ModelLoadError, match="there is no such file or folder"):
        plan_required_memory(EngineConfig("/nowhere/model"), 1 << 30)


def test_an_encoder_does_not_get_the_options_of_all_models_that_it_lacks(tmp_path: Path) -> None:
    model = str(write_pooling_model(tmp_path / "bert", "bert"))
    common = EngineConfig(kv_cache_memory_bytes=1 << 20, prefix_cache_dir=str(tmp_path), max_num_seqs=3)
    given = replace(common, model=model)
    config, required = plan_required_memory(given, 1 << 30, common)
    assert config == EngineConfig(model, max_num_seqs=3)
    assert required.kv_cache == 0
    build_engine(config)
    with pytest.raises(ConfigError, match="max_loras has no use for 'bert', an encoder: remove it"):
        plan_required_memory(replace(given, max_loras=2), 1 << 30, common)


def test_guides_have_the_planned_memory_of_processes() -> None:
    guides = Path(__file__).parents[3] / "docs" / "guide"
    engine, server = PROCESS_BYTES >> 20, SERVER_PROCESSES_BYTES >> 20
    text = (guides / "several-models.md").read_text(encoding="utf-8")
    assert f"and {engine} MiB for the process of its engine" in text
    assert f"is {server} MiB, because it also has the process that serves HTTP" in text
    rows = re.findall(r"│ processes +│ +([\d,]+) │ +(\d+) │", (guides / "laboratory.md").read_text(encoding="utf-8"))
    assert rows == [(f"{SERVER_PROCESSES_BYTES:,}", str(server))]
