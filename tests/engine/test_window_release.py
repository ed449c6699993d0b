"""Models with sliding windows give the same tokens when blocks that left the window are released, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.engine.startup.factory import build_engine
from chairlift.events import EventList, Step
from support.native import needs_native
from support.tiny_models import architectures_with

PROMPT = [3 + 7 * position % 250 for position in range(120)]
NEW_TOKENS = 20


def run(folder: Path, **options: Any) -> tuple[list[list[int]], int]:
    """The answers to a prompt and its beginning, and the most bytes of KV memory that the requests held."""
    config = EngineConfig(
        model=str(folder),
        skip_tokenizer_init=True,
        num_threads=1,
        block_size=4,
        max_num_seqs=2,
        kv_cache_memory_bytes=1 << 20,
        **{"max_num_batched_tokens": 16, "kv_cache_dtype": "float32", **options},
    )
    events = EventList()
    llm = LLM(engine=build_engine(config, events=events))
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in (PROMPT, PROMPT[:90])]
    plan = llm.engine.facts.kv_cache_plan
    steps = [event for event in events.events if isinstance(event, Step)]
    held = max(plan.num_blocks - step.free_blocks for step in steps) * plan.block_bytes
    return [output.outputs[0].token_ids for output in outputs], held


@pytest.mark.parametrize(
    ("arch", "kernels"),
    [
        *((arch, "torch") for arch in ("mistral", "gemma3", "gpt_oss")),
        *(pytest.param(arch, "native", marks=needs_native) for arch in architectures_with("windows")),
    ],
)
def test_released_windows_give_the_same_tokens_in_less_memory(
    arch: str, kernels: str, tiny_model_dir: Callable[..., Path]
) -> None:
    folder = tiny_model_dir(arch, **({"sliding_window": 40} if arch == "phi3" else {}))
    answers, held = run(folder, kernels=kernels)
    kept_answers, kept = run(folder, kernels=kernels, disable_hybrid_kv_cache_manager=True)
    assert answers == kept_answers
    assert held < kept
