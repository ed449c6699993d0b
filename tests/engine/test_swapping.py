"""Preemption by swapping: the same tokens as with recomputation, and messages for what is not swapped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.engine.startup.factory import build_engine
from chairlift.errors import ConfigError
from chairlift.events import EventList, Step
from support.native import needs_native

PROMPTS = [[number, *range(5, 20)] for number in range(6)]


@pytest.fixture
def folder(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir("llama")


def run(folder: Path, **options: Any) -> tuple[list[list[int]], list[Step]]:
    """The sampled answers and the steps of an engine whose pool is too small for all requests."""
    events = EventList()
    config = EngineConfig(
        str(folder), skip_tokenizer_init=True, num_threads=1, num_kv_blocks=14, block_size=4, seed=0, **options
    )
    llm = LLM(engine=build_engine(config, events=events))
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True, repetition_penalty=1.2)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    steps = [event for event in events.events if isinstance(event, Step)]
    llm.close()
    return [output.outputs[0].token_ids for output in outputs], steps


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kernels": "torch", "enable_prefix_caching": False},
        {"speculative_config": {"method": "ngram"}, "enable_prefix_caching": False},
        pytest.param({"kv_cache_dtype": "int8", "enable_prefix_caching": False}, marks=needs_native),
    ],
    ids=str,
)
def test_swapping_gives_the_tokens_of_recomputation(options: dict[str, Any], folder: Path) -> None:
    expected, recomputed = run(folder, **options)
    found, steps = run(folder, preemption_mode="swap", swap_space=0.001, **options)
    assert found == expected
    assert sum(len(step.preempted) for step in recomputed) > 0
    assert sum(len(step.swapped) for step in steps) == sum(len(step.preempted) for step in steps) > 0
    assert sum(step.num_recomputed for step in steps) == 0
    assert steps[-1].swap_blocks == 0


@pytest.mark.parametrize("arch", ["granite4_h", "lfm2", "qwen3_5"])
def test_a_model_with_recurrent_state_continues_at_its_last_checkpoint(
    arch: str, tiny_model_dir: Callable[..., Path]
) -> None:
    expected, recomputed = run(tiny_model_dir(arch))
    found, steps = run(tiny_model_dir(arch), preemption_mode="swap", swap_space=0.001)
    assert found == expected
    assert sum(len(step.swapped) for step in steps) > 0
    assert sum(step.num_recomputed for step in steps) <= sum(step.num_recomputed for step in recomputed)
    assert steps[-1].swap_blocks == 0


@pytest.mark.parametrize(("arch", "options"), [("gemma3", {}), ("granite4_h", {"enable_prefix_caching": False})])
def test_models_that_are_not_swapped_are_refused(
    arch: str, options: dict[str, Any], tiny_model_dir: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=r"preemption_mode=swap does not support '.*tiny_.*', because it has"):
        run(tiny_model_dir(arch), preemption_mode="swap", swap_space=0.001, **options)


def test_a_swap_space_without_a_block_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"swap_space=0 GiB does not hold a block.*raise swap_space"):
        run(folder, preemption_mode="swap", swap_space=0.0)
