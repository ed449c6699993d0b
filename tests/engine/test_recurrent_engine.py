"""Models with recurrent layers give the same tokens and the same bits of state however their requests are computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.engine.startup.decoder_engine import prepare_decoder
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.engine.startup.loaded_model import LoadedDecoder, load_model
from chairlift.engine.startup.memory_plan import plan_memory
from chairlift.errors import ConfigError
from chairlift.events import EventList, RequestFinished, Step
from chairlift.outputs import NewRequest, SchedulerOutput
from native import needs_native

KERNEL_SETS = ["torch", pytest.param("native", marks=needs_native)]
ARCHITECTURES = ["granite4_h", "falcon_h1", "nemotron_h", "lfm2", "qwen3_5"]
NEW_TOKENS = 14


def make_config(folder: Path, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "num_threads": 1,
        "block_size": 4,
        "max_num_seqs": 6,
        "max_model_len": 160,
        "max_num_batched_tokens": 64,
        "num_kv_blocks": 1500,
    }
    return EngineConfig(**{**defaults, **options})


def prompts() -> list[list[int]]:
    """Prompts with common beginnings, and one with itself again."""
    rng = random.Random(1)
    shared = [rng.randrange(3, 250) for _ in range(60)]
    made = [shared[: rng.randint(1, 60)] + [rng.randrange(3, 250) for _ in range(rng.randint(0, 30))] for _ in range(7)]
    return [*made, made[0], shared]


def generate(folder: Path, n: int = 1, **options: Any) -> tuple[list[list[int]], list[Any]]:
    """The tokens of all prompts, twice, and the events."""
    events = EventList()
    llm = LLM(engine=build_engine(make_config(folder, **options), events=events))
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, n=n)
    outputs = llm.generate([*prompts(), *prompts()], params, use_tqdm=False)
    return [each.token_ids for output in outputs for each in output.outputs], events.events


@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tokens_do_not_depend_on_how_requests_are_computed(
    arch: str, kernels: str, tiny_model_dir: Callable[..., Path]
) -> None:
    folder = tiny_model_dir(arch)
    alone, _ = generate(folder, kernels=kernels, max_num_seqs=1, enable_prefix_caching=False)
    cached, events = generate(folder, kernels=kernels)
    assert cached == alone
    assert sum(e.num_cached_tokens > 0 for e in events if isinstance(e, RequestFinished)) >= len(prompts())
    chunked, _ = generate(folder, kernels=kernels, max_num_batched_tokens=9)
    assert chunked == alone
    preempted, events = generate(folder, kernels=kernels, num_kv_blocks=40, max_num_batched_tokens=32)
    assert preempted == alone
    assert sum(len(e.preempted) for e in events if isinstance(e, Step)) > 0
    for policy in ({"batching": "static"}, {"kv": "exact"}, {"kv": "pow2"}):
        assert generate(folder, kernels=kernels, **policy)[0] == alone
    siblings, _ = generate(folder, n=3, kernels=kernels)
    assert siblings == [tokens for tokens in alone for _ in range(3)]


def compute_state(engine: Engine, prompt: list[int], bounds: list[int]) -> list[torch.Tensor]:
    """The states of a prompt that is computed in chunks with these ends."""
    assert isinstance(engine.loaded, LoadedDecoder)
    runner: Any = engine.core._executor
    blocks = [list(range(-(-len(prompt) // 4)))]
    new = [NewRequest("a", prompt, len(prompt), 0, blocks, SamplingParams(temperature=0), 0, [])]
    for step, (start, end) in enumerate(zip([0, *bounds], bounds, strict=False)):
        runner.result(runner.submit(SchedulerOutput(step, {"a": end - start}, new)))
        new = []
    row = runner._rows.row_of("a")
    runner.submit(SchedulerOutput(len(bounds), {}, removed=["a"]))
    layers = [layer.recurrence for layer in engine.loaded.model.layers if layer.recurrence is not None]
    return [part[row].clone() for layer in layers for part in layer.state if part is not None]


@needs_native
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_64_divisions_of_a_prompt_give_the_same_bits_of_state(arch: str, tiny_model_dir: Callable[..., Path]) -> None:
    engine = build_engine(make_config(tiny_model_dir(arch), kernels="native", max_num_batched_tokens=100))
    rng = random.Random(2)
    prompt = [rng.randrange(3, 250) for _ in range(97)]
    expected = compute_state(engine, prompt, [97])
    assert any(part.abs().sum() > 0 for part in expected)
    for _ in range(64):
        bounds = [*sorted(rng.sample(range(1, 97), rng.randint(1, 12))), 97]
        assert all(map(torch.equal, compute_state(engine, prompt, bounds), expected))


def test_the_budget_holds_blocks_states_and_checkpoints(tiny_model_dir: Callable[..., Path]) -> None:
    budget = 4 << 20
    folder = tiny_model_dir("nemotron_h")
    config = make_config(folder, num_kv_blocks=None, kv_cache_memory_bytes=budget, max_num_seqs=64)
    engine = build_engine(config)
    plan = engine.facts.kv_cache_plan
    assert plan.num_bytes <= budget
    assert plan.num_states == 64
    assert plan.num_checkpoints > 1
    assert isinstance(engine.loaded, LoadedDecoder)
    layers = [layer.recurrence for layer in engine.loaded.model.layers if layer.recurrence is not None]
    parts = [part for layer in layers for part in layer.state if part is not None]
    assert sum(part.nbytes for part in parts) == plan.num_state_slots * plan.state_bytes
    planned = plan_memory(config, engine.loaded.config, engine.loaded.formats, None)
    assert planned.pool == plan, "what `chairlift plan` shows"
    uncached = build_engine(make_config(folder, enable_prefix_caching=False)).facts.kv_cache_plan
    assert uncached.num_checkpoints == 0
    again = build_engine(make_config(folder, num_kv_blocks=plan.num_blocks, max_num_seqs=64))
    assert again.facts.kv_cache_plan.num_checkpoints == plan.num_checkpoints, "as a restart of the engine does"


def test_options_without_a_meaning_are_errors(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model_dir("nemotron_h")
    loaded = load_model(make_config(folder))
    assert isinstance(loaded, LoadedDecoder)
    cases: dict[str, dict[str, Any]] = {
        "cannot be set back": {"speculative_config": {"method": "ngram"}},
        "kept in memory only": {"prefix_cache_dir": tmp_path},
        "lower max_num_seqs": {"num_kv_blocks": None, "kv_cache_memory_bytes": 1 << 16, "max_num_seqs": 64},
    }
    for message, options in cases.items():
        with pytest.raises(ConfigError, match=message):
            prepare_decoder(make_config(folder, **options), loaded, None)
