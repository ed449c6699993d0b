"""The engine on tiny random models generates the greedy tokens of transformers, under any limits.

Everything is kept in float32. In other types the tokens are others, but the same in every squeeze, to the last bit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.core.kv.kv_groups import KVGroups
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.pool_plan import plan_layout
from chairlift.events import EventList, Step
from chairlift.kernels.cpu import load
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.registry import read_hf_config
from support.native import needs_native
from support.position_logprobs import first_logprobs
from support.shared_models import shared_model
from support.tiny_models import EVERY_ARCHITECTURE, TINY_MODELS, architectures_with, load_reference, make_tiny_config

NEW_TOKENS = 20
SQUEEZES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 7, "max_num_seqs": 6},
    "cache off": {"enable_prefix_caching": False},
    "one seat": {"max_num_seqs": 1},
    "small blocks": {"block_size": 1, "num_kv_blocks": 600},
    "preempted": {"num_kv_blocks": 24, "block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 8},
    "preempted, cache off": {"num_kv_blocks": 24, "block_size": 4, "enable_prefix_caching": False, "max_num_seqs": 8},
}
HARDEST = "preempted"
HARD = ["chunked", "small blocks", HARDEST, "preempted, cache off"]
FULLY_SQUEEZED = ["llama", "gemma4", "granite4_h"]


def squeezed_runs() -> list[Any]:
    """(architecture, kernels, squeeze): the hardest squeeze of every kind of layer, and the hard ones of every layout
    of memory, which is all that they depend on. FULLY_SQUEEZED have the others too. The hardest is also run with
    torch's kernels for some, and on a CUDA device, if there is one, for all of them.

    `test_models_parity.py` compares prompts, chunks and decodes of every architecture with every kernel set.
    """
    runs, layouts, with_torch = [], architectures_with("layout"), architectures_with("torch")
    for arch in architectures_with("engine"):
        squeezes = HARD if arch in layouts else [HARDEST]
        runs += [(arch, "native", squeeze) for squeeze in (SQUEEZES if arch in FULLY_SQUEEZED else squeezes)]
        if arch in with_torch:
            runs.append((arch, "torch", HARDEST))
        if torch.cuda.is_available():
            runs.append((arch, "cuda", HARDEST))
    marks = {"native": needs_native, "cuda": pytest.mark.gpu}
    return [pytest.param(*run, marks=[marks[run[1]]] if run[1] in marks else []) for run in runs]


def make_prompts() -> list[list[int]]:
    """Prompts of many lengths, some of them with a common prefix."""
    rng = random.Random(7)
    common = [rng.randrange(3, 256) for _ in range(40)]
    fresh = [[rng.randrange(3, 256) for _ in range(length)] for length in (1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 33, 70)]
    return [*fresh, [*common, 9], [*common, 10, 11], common]


REFERENCES: dict[Path, list[list[int]]] = {}
"""The answers of transformers by folder."""


def reference_tokens(folder: Path, answers: list[list[int]]) -> list[list[int]]:
    """The answers of transformers, computed one prompt at a time.

    One pass over a prompt and its answer shows whether the answer is greedy. Other answers are generated again.
    """
    if folder not in REFERENCES:
        model = load_reference(folder)
        model.generation_config = transformers.GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0, bos_token_id=1
        )
        REFERENCES[folder] = [
            answer
            if is_greedy(model, prompt, answer)
            else model.generate(torch.tensor([prompt]))[0, len(prompt) :].tolist()
            for prompt, answer in zip(make_prompts(), answers, strict=True)
        ]
    return REFERENCES[folder]


@torch.inference_mode()
def is_greedy(model: transformers.PreTrainedModel, prompt: list[int], answer: list[int]) -> bool:
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return len(answer) == NEW_TOKENS and logits.argmax(dim=1).tolist() == answer


def pool_size(model: ModelConfig, config: EngineConfig) -> int:
    """The configured blocks, or, with several groups of layers, those of a request that holds so many in one group."""
    assert config.num_kv_blocks is not None
    layout = plan_layout(config, model)
    if len(layout.windows) == 1:
        return config.num_kv_blocks
    groups = KVGroups(layout.windows, config.block_size, config.largest_token_budget)
    return sum(groups.most_blocks(config.num_kv_blocks * config.block_size))


def make_llm(config: EngineConfig, events: EventList | None = None) -> LLM:
    loaded = shared_model(config)
    config = replace(config, num_kv_blocks=pool_size(loaded.config, config))
    return LLM(engine=build_engine(config, loaded=loaded, events=events))


def engine_answers(folder: Path, **options: Any) -> tuple[list[list[int]], list[Step]]:
    events = EventList()
    config = EngineConfig(
        model=str(folder),
        skip_tokenizer_init=True,
        num_threads=1,
        **{"num_kv_blocks": 200, "kv_cache_dtype": "float32", **options},
    )
    llm = make_llm(config, events)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate(make_prompts(), params, use_tqdm=False)
    assert llm.engine.core.scheduler.is_idle
    return [output.outputs[0].token_ids for output in outputs], [e for e in events.events if isinstance(e, Step)]


@pytest.mark.parametrize(("arch", "kernels", "squeeze"), squeezed_runs())
def test_greedy_tokens_are_those_of_transformers(
    arch: str, kernels: str, squeeze: str, tiny_model_dir: Callable[..., Path]
) -> None:
    folder = tiny_model_dir(arch)
    where = {"kernels": "torch", "device": "cuda", "dtype": "float32"} if kernels == "cuda" else {"kernels": kernels}
    answers, steps = engine_answers(folder, **where, **SQUEEZES[squeeze])
    assert answers == reference_tokens(folder, answers)
    if squeeze.startswith("preempted"):
        has_windows = any(len(blocks) for step in steps for blocks in step.released_blocks.values())
        assert sum(len(step.preempted) for step in steps) >= (3 if has_windows else 8)
    if squeeze in ("chunked", "preempted"):
        chunks = [
            n for step in steps for n, c in zip(step.num_scheduled, step.num_computed, strict=True) if n > 1 and c
        ]
        assert len(chunks) > 10


def kinds_of(folder: Path) -> set[str]:
    """The kinds of attention, positions, states and feed-forward layers of a model."""
    config = read_hf_config(json.loads((folder / "config.json").read_text()), source="config.json")
    found = {"a table of positions"} if config.positions is not None else set()
    for layer in config.layers:
        attention, recurrence = layer.attention, layer.recurrence
        found |= {f"state of {type(recurrence.rule).__name__}"} if recurrence is not None else set()
        found |= {f"layer with {attention and 'attention'}, {recurrence and 'recurrence'}, {layer.is_parallel}"}
        found |= {"experts"} if layer.feed_forward is not None and layer.feed_forward.router is not None else set()
        found |= {"experts beside a network"} if layer.parallel_experts is not None else set()
        if attention is not None:
            rope = attention.rope
            properties = {
                "window": attention.sliding_window,
                "soft cap": attention.logits_soft_cap,
                "memory of another layer": attention.kv_source is not None,
                "sinks": attention.sinks,
                "latent": attention.latent,
                "rotation": rope,
                "factors of long prompts": rope and rope.long_factors,
                "queries scaled by position": rope and rope.query_scaling_beta,
            }
            found |= {f"{name}: {bool(value)}" for name, value in properties.items()}
    return found


def test_every_kind_of_layer_has_an_architecture(tmp_path: Path) -> None:
    kinds = {}
    for arch in TINY_MODELS:
        model_class, config = make_tiny_config(arch)
        config.architectures = [model_class.__name__]
        config.save_pretrained(tmp_path / arch)
        kinds[arch] = kinds_of(tmp_path / arch)
    tested = set().union(*(kinds[arch] for arch in architectures_with("engine")))
    assert {arch: missing for arch, found in kinds.items() if (missing := found - tested)} == {}


FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16 memory": {"kv_cache_dtype": "auto"},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "q4_1": {"quantization": "q4_1", "kv_cache_dtype": "bfloat16"},
    "q8_0": {"quantization": "q8_0", "kv_cache_dtype": "float32"},
}


def formats_of_architectures() -> list[tuple[str, str]]:
    """(architecture, formats): one of the formats for each architecture, or two quantizations for every one."""
    found = architectures_with("bits")
    if EVERY_ARCHITECTURE:
        return [(arch, formats) for arch in found for formats in ("int8", "q4_1")]
    return [(arch, [*FORMATS][index % len(FORMATS)]) for index, arch in enumerate(found)]


def answers_with_logprobs(folder: Path, num_threads: int, **options: Any) -> list[list[tuple[int, float]]]:
    config = EngineConfig(
        model=str(folder), skip_tokenizer_init=True, num_threads=2, **{"num_kv_blocks": 200, **options}
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    llm = make_llm(config)
    load().set_num_threads(num_threads)
    try:
        outputs = llm.generate(make_prompts(), params, use_tqdm=False)
    finally:
        load().set_num_threads(config.num_threads)
    return [
        [*zip(output.outputs[0].token_ids, first_logprobs(output.outputs[0].logprobs or []), strict=True)]
        for output in outputs
    ]


@needs_native
@pytest.mark.parametrize(("arch", "formats"), formats_of_architectures())
def test_logits_do_not_depend_on_batch_chunks_blocks_or_threads(
    arch: str, formats: str, tiny_model_dir: Callable[..., Path]
) -> None:
    """Rounding does not depend on the batch, the chunks, the block size or the number of threads.

    Each format is run with the kinds of layers of two or three architectures, of those that `test_batch_invariance.py`
    does not have. The tests of kernels have all formats.
    """
    folder = tiny_model_dir(arch)
    alone = answers_with_logprobs(folder, num_threads=1, max_num_seqs=1, **FORMATS[formats])
    for squeeze in (SQUEEZES["chunked"] | SQUEEZES["small blocks"], SQUEEZES["preempted"]):
        assert answers_with_logprobs(folder, num_threads=2, **FORMATS[formats], **squeeze) == alone, squeeze


RESERVING: dict[str, dict[str, Any]] = {
    "exact": {"num_kv_blocks": 64},
    "exact, first fit": {"kv_arena": "first-fit", "num_kv_blocks": 50},
    "max": {"num_kv_blocks": 80, "max_model_len": 100},
    "pow2": {"num_kv_blocks": 70},
    "oracle": {"num_kv_blocks": 64, "max_num_batched_tokens": 9, "max_num_seqs": 8},
}


@pytest.mark.parametrize("case", RESERVING)
def test_reserving_the_memory_gives_the_same_answers_without_preemption(
    case: str, tiny_model_dir: Callable[..., Path]
) -> None:
    folder = tiny_model_dir("llama")
    answers, steps = engine_answers(folder, kv=case.split(",")[0], block_size=4, **RESERVING[case])
    assert answers == reference_tokens(folder, answers)
    assert not any(step.preempted for step in steps)
    assert max(step.num_waiting for step in steps) > 0


POOLS: dict[str, dict[str, Any]] = {
    "paged": {"num_kv_blocks": 200, "static_batch_size": 13},
    "exact": {"num_kv_blocks": 64},
    "max": {"num_kv_blocks": 80, "max_model_len": 100},
    "pow2": {"num_kv_blocks": 70},
    "oracle": {"num_kv_blocks": 64},
}


@pytest.mark.parametrize("run_to", ["batch", "global"])
@pytest.mark.parametrize("kv", POOLS)
def test_static_batches_with_padding_give_the_same_answers(
    kv: str, run_to: str, tiny_model_dir: Callable[..., Path]
) -> None:
    folder = tiny_model_dir("llama" if kv != "paged" else "mistral")
    answers, steps = engine_answers(
        folder,
        batching="static",
        static_run_to=run_to,
        max_num_batched_tokens=64,
        kv=kv,
        block_size=4,
        **{"static_batch_size": 4, **POOLS[kv]},
    )
    assert answers == reference_tokens(folder, answers)
    assert not any(step.preempted for step in steps)
    assert sum(sum(step.num_padding) for step in steps) > 40
    assert any(c and n and p for step in steps for c, n, p in columns(step)) == (kv == "paged"), "padding before a hit"


def columns(step: Step) -> list[tuple[int, int, int]]:
    return list(zip(step.num_computed, step.num_scheduled, step.num_padding, strict=True)) if step.num_padding else []


def test_the_prefix_of_a_running_request_is_reused(tiny_model_dir: Callable[..., Path]) -> None:
    config = EngineConfig(
        model=str(tiny_model_dir("llama")), skip_tokenizer_init=True, num_kv_blocks=100, num_threads=1
    )
    llm = LLM(engine=build_engine(config))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = list(range(3, 103))
    first = llm.generate(prompt, params)[0]
    second = llm.generate(prompt + first.outputs[0].token_ids + [5], params)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 96)
