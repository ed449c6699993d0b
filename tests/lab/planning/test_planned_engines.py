"""Engines have the KV blocks, the concurrent requests and the bytes that were planned."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, islice, product, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.config import QUANTIZATIONS, SchedulerConfig
from chairlift.core.engine_core import EngineCore
from chairlift.core.factory import KVPool
from chairlift.engine.startup.activation_plan import plan_activations
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import load_model
from chairlift.engine.startup.memory_plan import plan_memory
from chairlift.engine.startup.pool_capacity import PoolCapacity, RequestLengths, compute_pool_capacity
from chairlift.errors import RequestError
from chairlift.events import EngineStarted, EventList, RequestWaiting, Step
from chairlift.kernels.choice import choose_kernels
from chairlift.kernels.kernel_memory import total
from chairlift.lab.planning.planned_workload import PlannedWorkload
from chairlift.lab.planning.planner import DeploymentPlan, PlannedModel, make_plan
from chairlift.lab.sim.model_shape import ModelShape
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.loading.resolve import resolve_model
from chairlift.models.declaration.matrix_spec import EMBEDDING, LM_HEAD, PER_LAYER_EMBEDDING
from chairlift.request import Request
from support.case_loop import loop_over
from support.fakes import make_engine, make_request, run_to_end
from support.native import needs_native
from support.parameter_memory import parameter_bytes
from support.tiny_models import TINY_MODELS, architectures_with

RESERVATIONS = [(kv, arena) for kv in ("exact", "max", "pow2", "oracle") for arena in ("buddy", "first-fit")]
POLICIES = [("paged", "buddy"), *RESERVATIONS]
MAX_MODEL_LEN = 40

LENGTHS = st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 8)).map(
    lambda drawn: RequestLengths(drawn[0], drawn[1], drawn[1] + drawn[2])
)


def compute_capacity(pool: KVPool, lengths: Iterator[RequestLengths]) -> PoolCapacity:
    core, _, _, _ = make_engine(max_num_seqs=1000, max_num_batched_tokens=1000)
    return compute_pool_capacity(pool, core.scheduler._config, lengths)


def make_loaded_engine(
    pool: KVPool, lengths: Iterator[RequestLengths], count: int, budget: int, caching: bool = True
) -> tuple[EngineCore, EventList, int]:
    """Create an engine with `count` seats and queue `count` requests.

    Returns:
        The engine core, its events, and the number of requests that were rejected.
    """
    core, _, _, events = make_engine(
        kv=pool.kv,
        arena=pool.kv_arena,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        max_model_len=pool.max_model_len,
        max_num_seqs=count,
        max_num_batched_tokens=max(budget, count),
        enable_prefix_caching=caching and pool.kv == "paged",
    )
    num_added = num_rejected = 0
    for index, length in enumerate(lengths):
        if num_added == count:
            break
        try:
            core.add(make_request(str(index), [index] * length.prompt, length.max_tokens, output_len=length.output))
        except RequestError:
            num_rejected += 1
        else:
            num_added += 1
    return core, events, num_rejected


def step_events(events: EventList) -> list[Step]:
    return [event for event in events.events if isinstance(event, Step)]


def memory_waits(events: EventList) -> list[RequestWaiting]:
    waits = [event for event in events.events if isinstance(event, RequestWaiting)]
    return [wait for wait in waits if wait.reason in ("memory", "preemption")]


@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=5),
    policy=st.sampled_from(RESERVATIONS),
    num_blocks=st.integers(1, 90),
    block_size=st.integers(1, 6),
    budget=st.integers(1, 200),
)
@settings(max_examples=80)
def test_reservations_run_the_planned_requests_and_one_more_waits(
    lengths: list[RequestLengths], policy: tuple[str, str], num_blocks: int, block_size: int, budget: int
) -> None:
    pool = KVPool(num_blocks, block_size, min(MAX_MODEL_LEN, num_blocks * block_size), *policy)
    fit = compute_capacity(pool, cycle(lengths))
    if not fit.num_fit:
        assert fit.error is not None
        return
    core, events, num_rejected = make_loaded_engine(pool, cycle(lengths), fit.num_fit + 1, budget)
    core.step()
    first = step_events(events)[0]
    assert len(first.admitted) == fit.num_fit
    (wait,) = memory_waits(events)
    assert (wait.reason, wait.num_running) == ("memory", fit.num_fit)
    assert num_rejected >= fit.num_rejected
    held = (num_blocks - first.free_blocks) * block_size
    assert held == fit.num_slots_held
    run_to_end(core)
    assert not any(step.preempted for step in step_events(events))


@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=5),
    num_blocks=st.integers(1, 90),
    block_size=st.integers(1, 6),
    budget=st.integers(1, 200),
    caching=st.booleans(),
)
@settings(max_examples=60)
def test_paging_finishes_the_planned_requests_without_waits_or_preemptions(
    lengths: list[RequestLengths], num_blocks: int, block_size: int, budget: int, caching: bool
) -> None:
    pool = KVPool(num_blocks, block_size, MAX_MODEL_LEN)
    fit = compute_capacity(pool, cycle(lengths))
    if not fit.num_fit:
        assert fit.error is not None
        return
    core, events, _ = make_loaded_engine(pool, cycle(lengths), fit.num_fit, budget, caching)
    assert len(run_to_end(core)) == fit.num_fit
    assert memory_waits(events) == []
    assert not any(step.preempted for step in step_events(events))
    assert len(step_events(events)[0].admitted) == fit.num_fit


@given(length=LENGTHS, num_blocks=st.integers(1, 90), block_size=st.integers(1, 6), caching=st.booleans())
@settings(max_examples=60)
def test_paging_makes_one_more_than_planned_wait_or_preempt(
    length: RequestLengths, num_blocks: int, block_size: int, caching: bool
) -> None:
    """All prompts fit the budget of one step, so all reach their full length in the same step."""
    pool = KVPool(num_blocks, block_size, MAX_MODEL_LEN)
    fit = compute_capacity(pool, repeat(length))
    if not fit.num_fit:
        assert fit.error is not None
        return
    count = fit.num_fit + 1
    core, events, _ = make_loaded_engine(pool, repeat(length), count, count * length.prompt, caching)
    assert len(run_to_end(core)) == count
    assert memory_waits(events) or any(step.preempted for step in step_events(events))


@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=5),
    policy=st.sampled_from(POLICIES),
    num_blocks=st.integers(1, 90),
    static_batch_size=st.integers(1, 6),
)
@settings(max_examples=60)
def test_a_static_batch_has_the_planned_requests(
    lengths: list[RequestLengths], policy: tuple[str, str], num_blocks: int, static_batch_size: int
) -> None:
    pool = KVPool(num_blocks, 4, min(MAX_MODEL_LEN, num_blocks * 4), *policy)
    assume(policy[0] != "max" or compute_capacity(pool, repeat(RequestLengths(1, 1, 1))).num_fit)
    core, _, _, events = make_engine(
        kv=pool.kv,
        arena=pool.kv_arena,
        num_blocks=num_blocks,
        max_model_len=pool.max_model_len,
        batching="static",
        static_batch_size=static_batch_size,
        enable_prefix_caching=False,
    )
    fit = compute_pool_capacity(pool, core.scheduler._config, cycle(lengths))
    num_added = 0
    for index, length in enumerate(islice(cycle(lengths), 40)):
        try:
            core.add(make_request(str(index), [index] * length.prompt, length.max_tokens, output_len=length.output))
            num_added += 1
        except RequestError:
            continue
    core.step()
    assert bool(num_added) == bool(fit.num_fit)
    if num_added > static_batch_size:
        assert len(step_events(events)[0].admitted) == fit.num_running


def plan_deployment(
    folder: Path, config: EngineConfig, prompt: int, output: int, memory_bytes: int | None = None
) -> DeploymentPlan:
    files = resolve_model(str(folder))
    model_config = files.config()
    model = PlannedModel("tiny", str(folder), model_config, files.formats(model_config))
    load = PlannedWorkload(input_len=parse_lengths(f"fixed:{prompt}"), output_len=parse_lengths(f"fixed:{output}"))
    return make_plan(model, config, load, memory_bytes=memory_bytes)


def make_config(folder: Path, kv: str, arena: str, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        skip_tokenizer_init=True,
        num_threads=1,
        kv=kv,
        kv_arena=arena,
        max_model_len=64,
        max_num_seqs=40,
        max_num_batched_tokens=1000,
        block_size=4,
        **options,
    )


@pytest.mark.parametrize(("kv", "arena"), POLICIES)
def test_the_engine_has_the_planned_blocks_and_requests(
    kv: str, arena: str, tiny_model_dir: Callable[..., Path]
) -> None:
    folder = tiny_model_dir("qwen2")
    sizes = plan_deployment(folder, make_config(folder, kv, arena, num_kv_blocks=99), 17, 12).memory
    memory_bytes = total(sizes.weights) + total(sizes.activations) + 104 * sizes.pool.block_bytes + 77
    plan = plan_deployment(folder, make_config(folder, kv, arena), 17, 12, memory_bytes)
    pool, count = plan.memory.pool, plan.fit.num_fit
    assert pool.num_blocks == 103
    assert 6 <= count <= 14
    by_memory = build_engine(make_config(folder, kv, arena, kv_cache_memory_bytes=plan.memory.kv_bytes))
    assert by_memory.facts.kv_cache_plan == pool
    assert by_memory.facts.scheduler_config.max_model_len == plan.memory.max_model_len
    for num_requests in (count, count + 1):
        events = EventList()
        config = make_config(folder, kv, arena, num_kv_blocks=pool.num_blocks)
        llm = LLM(engine=build_engine(config, events=events))
        assert llm.engine.facts.kv_cache_plan.num_blocks == pool.num_blocks
        rng = random.Random(num_requests)
        prompts = [[rng.randrange(3, 256) for _ in range(17)] for _ in range(num_requests)]
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 12 for output in outputs)
        has_preempted = any(step.preempted for step in step_events(events))
        if num_requests == count:
            assert (memory_waits(events), has_preempted) == ([], False)
        else:
            assert memory_waits(events) or has_preempted
            assert not (has_preempted and kv != "paged")


@loop_over("arch", TINY_MODELS)
def test_weights_are_planned_to_the_byte(arch: str, tiny_model_dir: Callable[..., Path]) -> None:
    config = EngineConfig(model=str(tiny_model_dir(arch)), skip_tokenizer_init=True, num_threads=1, kernels="torch")
    loaded = load_model(config)
    items = loaded.planned_weights
    assert parameter_bytes(loaded.model) == total(items)
    has_copy = any("packed copy" in item.name for item in items)
    assert has_copy == loaded.config.tie_word_embeddings


@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
def test_a_predictor_is_planned_to_the_byte_and_its_k_and_v_take_a_part_of_the_pool(
    arch: str, kernels: str, tiny_model_dir: Callable[..., Path]
) -> None:
    folder = str(tiny_model_dir(arch, mtp_num_hidden_layers=1))
    config = EngineConfig(
        folder,
        skip_tokenizer_init=True,
        num_threads=1,
        kernels=kernels,
        kv_cache_memory_bytes=4 << 20,
        max_num_seqs=4,
        speculative_config={"method": "mtp"},
    )
    loaded, plain = load_model(config), load_model(replace(config, speculative_config=None))
    assert parameter_bytes(loaded.model) == total(loaded.planned_weights) > total(plain.planned_weights)
    engine = build_engine(config, loaded=loaded)
    planned = plan_memory(config, loaded.config, loaded.formats, None)
    assert engine.facts.kv_cache_plan == planned.pool
    num_layers = len(plain.config.attention_specs)
    own = plan_memory(config, plain.config, plain.formats, None)
    assert planned.token_bytes == own.token_bytes * (num_layers + 1) // num_layers
    assert total(planned.activations) > total(own.activations)


QUANTIZED_ARCHS = ["llama", "gemma4", "granite4_h", "gpt_oss", "qwen3_moe", "deepseek_v3"]
NATIVE_WEIGHTS = [
    *product(architectures_with("planned"), (None, "q4_0")),
    *product(QUANTIZED_ARCHS, (name for name in QUANTIZATIONS if name != "q4_0")),
]
"""Every kind of matrix with one quantization, and some with the others."""


@needs_native
@loop_over(("arch", "quantization"), NATIVE_WEIGHTS)
def test_native_weights_are_planned_to_the_byte(
    arch: str, quantization: str | None, tiny_model_dir: Callable[..., Path]
) -> None:
    inner = {"ffn_dim" if arch == "opt" else "intermediate_size": 104}
    folder, events = tiny_model_dir(arch, **inner), EventList()
    config = EngineConfig(
        model=str(folder), skip_tokenizer_init=True, num_threads=1, num_kv_blocks=9, quantization=quantization
    )
    loaded = load_model(config)
    build_engine(config, loaded=loaded, events=events)
    assert parameter_bytes(loaded.model) == total(loaded.planned_weights)
    started = events.events[0]
    assert isinstance(started, EngineStarted)
    assert (started.kernels, started.kv_cache_dtype, started.quantization) == ("native", "bfloat16", quantization)
    groups = {matrix.group for matrix in loaded.config.matrices} - {EMBEDDING, PER_LAYER_EMBEDDING}
    read = [item for item in loaded.planned_weights if item.name in (*groups, f"{EMBEDDING} and {LM_HEAD}")]
    assert started.weight_bytes == total(read)


def test_planned_weights_count_a_tied_embedding_twice_and_no_kv_memory(tiny_model_dir: Callable[..., Path]) -> None:
    folder = tiny_model_dir("llama", tie_word_embeddings=True)
    config = EngineConfig(model=str(folder), skip_tokenizer_init=True, num_threads=1, num_kv_blocks=9, kernels="torch")
    loaded = load_model(config)
    build_engine(config, loaded=loaded)
    assert parameter_bytes(loaded.model) == total(loaded.planned_weights)


def test_the_startup_log_has_planned_and_used_memory(
    tiny_model_dir: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder, events = tiny_model_dir("opt"), EventList()
    config = make_config(folder, "exact", "buddy", num_kv_blocks=64, kernels="torch")
    with caplog.at_level(logging.INFO, logger="chairlift"):
        build_engine(config, events=events)
    log = "\n".join(caplog.messages)
    assert len(caplog.messages) <= 5
    assert "weights: 422.2 KiB; activations" in log
    assert "kv=exact, buddy: the pool holds 4 concurrent requests of max_model_len tokens, or 4 of 32 prompt and" in log
    started = events.events[0]
    assert isinstance(started, EngineStarted)
    model_config = resolve_model(str(folder)).config()
    assert started.weight_bytes == ModelShape("tiny", model_config, 4).weight_bytes > 0


def peak_bytes(core: EngineCore) -> int:
    """Run all steps, and return the maximum number of bytes in tensors at any moment."""
    peak = 0
    while core.has_work:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            core.step()
        held = 0
        for event in recorded.profiler.kineto_results.events():
            held += event.nbytes() if event.name() == "[memory]" else 0
            peak = max(peak, held)
    return peak


GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
FLAT = SamplingParams(temperature=90, top_p=0.9999, logprobs=3, frequency_penalty=1.0, max_tokens=2, ignore_eos=True)
OF_PROMPT = SamplingParams(temperature=0, prompt_logprobs=3, max_tokens=1, ignore_eos=True)
NAMES = {id(GREEDY): "greedy", id(FLAT): "flat", id(OF_PROMPT): "of_prompt"}


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize(
    ("arch", "params"),
    [
        *product(["llama", "mistral", "gemma4", "gpt_oss", "qwen3_moe", "glm4_moe_lite", "opt"], [GREEDY]),
        *product(["llama", "gemma4"], [FLAT, OF_PROMPT]),  # Logits and samples do not depend on the layers.
    ],
    ids=lambda value: NAMES[id(value)] if isinstance(value, SamplingParams) else None,
)
def test_a_step_stays_below_the_planned_activations(
    arch: str, params: SamplingParams, kernels: str, tiny_model_dir: Callable[..., Path]
) -> None:
    """The bound leaves out gathered tiles: their minimum size exceeds all other activations of so small a model. Memory
    that native kernels allocate outside of tensors is not measured."""
    config = EngineConfig(
        model=str(tiny_model_dir(arch)),
        skip_tokenizer_init=True,
        num_threads=1,
        num_kv_blocks=200,
        max_num_seqs=16,
        max_num_batched_tokens=240,
        max_model_len=200,
        kernels=kernels,
    )
    engine = build_engine(config)
    limits, choice = SchedulerConfig(200, 16, 240), choose_kernels(config, engine.facts.model_config.dtype)
    items = plan_activations(engine.facts.model_config, choice.memory("cpu"), limits, 16)
    bound = total([item for item in items if not item.name.startswith("gathered")])
    rng = random.Random(0)
    for index, length in enumerate([15] * 12 + [198] * 3):
        prompt = [rng.randrange(3, 256) for _ in range(length)]
        engine.core.add(Request(str(index), prompt, params, params.max_tokens or 1, seed=index))
    assert (0.2 if kernels == "torch" else 0.05) * bound < peak_bytes(engine.core) < bound
