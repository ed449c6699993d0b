"""The arithmetic of plans: memory, concurrent requests and speed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.config import EngineConfig, SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.engine.startup.pool_capacity import RequestLengths, compute_pool_capacity
from chairlift.engine.startup.weight_plan import plan_weights
from chairlift.errors import ConfigError
from chairlift.kernels.kernel_memory import total
from chairlift.kernels.torch_set import TorchMemory
from chairlift.lab.planning.planned_workload import PlannedWorkload
from chairlift.lab.planning.planner import DeploymentPlan, PlannedModel, make_plan
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.devices import DEVICES
from chairlift.lab.sim.kernel_roofline import KernelRoofline
from chairlift.lab.sim.model_shape import MODEL_SHAPES, ModelShape
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.loading.model_source import FolderSource, declared_formats

GIB = 1 << 30
OPT_CONFIG = MODEL_SHAPES["opt-13b"].config
OPT_13B = PlannedModel("opt-13b", "opt-13b", OPT_CONFIG, declared_formats(OPT_CONFIG))
FIXED = PlannedWorkload(input_len=parse_lengths("fixed:100"), output_len=parse_lengths("fixed:60"))
A100 = DEVICES["A100-40GB"]
FIRST_FIT = [("exact", "first-fit"), ("max", "first-fit"), ("oracle", "first-fit")]


def opt_plan(load: PlannedWorkload = FIXED, memory_bytes: int | None = None, **options: object) -> DeploymentPlan:
    config = EngineConfig(**{"device": "cuda", **options})  # type: ignore[arg-type]
    return make_plan(OPT_13B, config, load, memory_bytes=memory_bytes, hardware=A100)


def seats(num: int = 10_000) -> SchedulerConfig:
    return SchedulerConfig(max_model_len=100_000, max_num_seqs=num, max_num_batched_tokens=num)


def test_planned_matrices_are_those_that_a_step_reads() -> None:
    for shape in MODEL_SHAPES.values():
        items = plan_weights(shape.config, TorchMemory("float16", "cuda"), formats)
        matrices = [item for item in items if item.name in ("attention", "MLP", "embedding", "embedding and LM head")]
        assert total(matrices) == shape.weight_bytes, shape.name


def test_kv_memory_of_opt_13b_is_that_of_the_vllm_paper() -> None:
    """Kwon et al., SOSP'23: 800 KiB a token (section 3), some 15.7K slots in 12 GB (table 1), and 7 requests of
    max_model_len at once (section 6.2)."""
    plan = opt_plan(kv_cache_memory_bytes=12 * GIB, kv="max", max_num_seqs=256)
    assert plan.memory.slot_bytes == 800 << 10
    assert plan.memory.pool.num_slots == (12 * GIB // (800 << 10) // 16 - 1) * 16 == 15_712
    assert plan.fit.num_fit == 7


def formats(name: str) -> str:
    """The format in the file of each matrix."""
    return "bf16"


def test_the_pool_has_what_weights_and_activations_leave() -> None:
    plan = opt_plan(memory_bytes=36 * GIB, max_num_seqs=256)
    memory, pool = plan.memory, plan.memory.pool
    left = 36 * GIB - total(memory.weights) - total(memory.activations)
    assert pool.num_blocks == left // (16 * 819_200) - 1
    assert pool.num_bytes + total(memory.weights) + total(memory.activations) <= 36 * GIB


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_plan_counts_the_swap_space_which_is_host_memory(device: str) -> None:
    options: dict[str, Any] = {"memory_bytes": 64 * GIB, "max_num_seqs": 64, "device": device, "kernels": "torch"}
    plan = opt_plan(**options)
    swapping = opt_plan(**options, preemption_mode="swap", swap_space=2)
    block_bytes = plan.memory.pool.block_bytes
    assert swapping.memory.pool.num_swap_blocks == 2 * GIB // block_bytes
    lost = (plan.memory.pool.num_blocks - swapping.memory.pool.num_blocks) * block_bytes
    assert 2 * GIB - block_bytes < lost < 2 * GIB + block_bytes if device == "cpu" else lost == 0
    assert "--preemption-mode swap --swap-space 2" in swapping.serve


def test_the_pool_is_limited_to_what_the_seats_can_use() -> None:
    plan = opt_plan(
        memory_bytes=80 * GIB,
        max_num_seqs=3,
        max_model_len=100,
        load=PlannedWorkload(input_len=parse_lengths("fixed:10"), output_len=parse_lengths("fixed:5")),
    )
    assert (plan.memory.pool.num_blocks, plan.memory.pool.limited_by) == (3 * 7, "demand")


def test_groups_of_layers_have_slots_of_their_own(tiny_model_dir: Callable[..., Path]) -> None:
    config = FolderSource(tiny_model_dir("gemma3"), "tiny").config()
    model = PlannedModel("tiny", "tiny", config, declared_formats(config))
    lengths = PlannedWorkload(input_len=parse_lengths("fixed:100"), output_len=parse_lengths("fixed:60"))
    options = EngineConfig(kernels="torch", kv_cache_memory_bytes=1 << 20, max_num_batched_tokens=64)
    plan = make_plan(model, options, lengths)
    kept = make_plan(model, replace(options, disable_hybrid_kv_cache_manager=True), lengths)
    assert plan.memory.pool.windows == (None, 20, 20, 20)
    assert (4 * plan.memory.slot_bytes, plan.memory.token_bytes) == (kept.memory.slot_bytes, kept.memory.token_bytes)
    # 159 slots are in 10 blocks, and a window of 20 tokens is in 3.
    assert plan.fit.num_slots_held == plan.fit.num_fit * (10 + 3 * 3) * 16
    assert kept.fit.num_slots_held == kept.fit.num_fit * 10 * 16
    assert plan.fit.num_fit > 1.8 * kept.fit.num_fit
    by_policy = {(each.fit.pool.kv, each.fit.pool.kv_arena): each.fit.num_fit for each in plan.policies}
    assert by_policy["exact", "first-fit"] == kept.fit.num_fit
    assert "--disable-hybrid-kv-cache-manager" in kept.serve


def test_a_plan_counts_lora_adapters(tiny_model_dir: Callable[..., Path]) -> None:
    config = FolderSource(tiny_model_dir("llama"), "tiny").config()
    model = PlannedModel("tiny", "tiny", config, declared_formats(config))
    lengths = PlannedWorkload(input_len=parse_lengths("fixed:100"), output_len=parse_lengths("fixed:60"))
    options = EngineConfig(kernels="torch", kv_cache_memory_bytes=1 << 20, max_loras=3, max_lora_rank=5)
    plan = make_plan(model, options, lengths)
    inputs_and_outputs = 2 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 2 * (64 + 96) + (96 + 64))
    (item,) = (item for item in plan.memory.weights if item.name == "LoRA adapters")
    assert item.num_bytes == 3 * 5 * inputs_and_outputs * 4
    assert "--max-loras 3 --max-lora-rank 5" in plan.serve
    options = EngineConfig(kernels="torch", kv_cache_memory_bytes=1 << 20)
    assert "lora" not in make_plan(model, options, lengths).serve


def test_a_plan_counts_the_states_and_the_logits_of_draft_tokens(tiny_model_dir: Callable[..., Path]) -> None:
    config = FolderSource(tiny_model_dir("lfm2"), "tiny").config()
    model = PlannedModel("tiny", "tiny", config, declared_formats(config))
    lengths = PlannedWorkload(input_len=parse_lengths("fixed:10"), output_len=parse_lengths("fixed:6"))
    options = EngineConfig(kernels="torch", kv_cache_memory_bytes=1 << 20, max_num_seqs=2)
    plain, plan = (
        make_plan(model, replace(options, speculative_config=speculative), lengths)
        for speculative in (None, {"num_speculative_tokens": 5})
    )
    pool = plan.memory.pool
    assert (pool.num_states, pool.num_draft_states, plan.to_dict()["num_draft_states"]) == (2, 5, 5)
    assert pool.num_bytes == plain.memory.pool.num_bytes + 5 * pool.state_bytes
    words = shlex.split(plan.serve)
    chosen = json.loads(words[words.index("--speculative-config") + 1])
    assert replace(options, speculative_config=chosen).speculative == plan.config.speculative
    with pytest.raises(ConfigError, match="plan without it"):
        make_plan(model, replace(options, speculative_config={"model": "smaller"}), lengths)


@pytest.mark.parametrize(
    ("memory_bytes", "options", "match"),
    [
        (
            25 * GIB,
            {"kernels": "torch"},
            "memory=25 GiB leaves nothing for K and V: the weights take 23.94 GiB and the activations",
        ),
        (None, {}, "give memory, kv_cache_memory_bytes or num_kv_blocks"),
        (30 * GIB, {"num_kv_blocks": 5}, "give memory, kv_cache_memory_bytes or num_kv_blocks"),
        (None, {"num_kv_blocks": 5, "max_model_len": 81}, "max_model_len=81 exceeds the 80 tokens"),
        (None, {"num_kv_blocks": 500, "max_model_len": 2049}, "exceeds the model's context of 2048"),
        (None, {"num_kv_blocks": 7}, "only 0 of 100000 pairs of fixed:100 prompt and fixed:60 output tokens fit"),
    ],
)
def test_impossible_plans_are_rejected(memory_bytes: int | None, options: dict[str, int], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        opt_plan(FIXED, memory_bytes, **options)


def test_a_request_rate_needs_a_device() -> None:
    load = PlannedWorkload(input_len=parse_lengths("fixed:10"), output_len=parse_lengths("fixed:5"), request_rate=2.0)
    with pytest.raises(ConfigError, match="request_rate=2"):
        make_plan(OPT_13B, EngineConfig(num_kv_blocks=10), load)


def blocks(num_slots: int, block_size: int) -> int:
    return -(-num_slots // block_size)


def fits_by_hand(pool: KVPool, lengths: list[RequestLengths]) -> int:
    """Counts the requests whose blocks fit together, for allocators that do not round."""
    slots: dict[str, Callable[[RequestLengths], int]] = {
        "paged": lambda n: n.prompt + n.output - 1,
        "oracle": lambda n: n.prompt + n.output - 1,
        "exact": lambda n: n.prompt + n.max_tokens - 1,
        "max": lambda n: pool.max_model_len,
    }
    used = 0
    for count, length in enumerate(lengths):
        used += blocks(slots[pool.kv](length), pool.block_size)
        if used > pool.num_blocks:
            return count
    raise AssertionError("the lengths do not fill the pool")


LENGTHS = st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 9)).map(
    lambda drawn: RequestLengths(drawn[0], drawn[1], drawn[1] + drawn[2])
)


@given(
    st.lists(LENGTHS, min_size=1, max_size=6),
    st.sampled_from([("paged", "buddy"), *FIRST_FIT]),
    st.integers(59, 300),
    st.integers(1, 7),
)
@settings(max_examples=150, deadline=None)
def test_the_capacity_is_that_of_the_sum_of_blocks(
    lengths: list[RequestLengths], policy: tuple[str, str], num_blocks: int, block_size: int
) -> None:
    pool = KVPool(num_blocks, block_size, 59, *policy)
    fit = compute_pool_capacity(pool, seats(), cycle(lengths))
    assert fit.num_fit == fit.num_running == fits_by_hand(pool, list(islice(cycle(lengths), num_blocks + 1)))
    assert fit.num_slots_written == sum(p + n - 1 for p, n, _ in islice(cycle(lengths), fit.num_fit))
    assert fit.num_slots_written <= fit.num_slots_held <= num_blocks * block_size


def test_seats_and_static_batches_limit_running_requests() -> None:
    pool = KVPool(100, 4, 40)
    limits = SchedulerConfig(40, 5, batching="static", static_batch_size=3)
    fit = compute_pool_capacity(pool, seats(5), repeat(RequestLengths(10, 7, 20)))
    assert (fit.num_fit, fit.num_running, fit.limited_by) == (25, 5, "max_num_seqs")
    fit = compute_pool_capacity(pool, limits, repeat(RequestLengths(10, 7, 20)))
    assert (fit.num_fit, fit.num_running, fit.limited_by) == (12, 3, "static_batch_size"), (
        "29 slots are reserved for each"
    )


def test_requests_that_can_never_fit_are_counted_as_rejected() -> None:
    pool = KVPool(12, 4, 48, "exact", "buddy")
    lengths = [
        RequestLengths(20, 5, 5),
        RequestLengths(40, 5, 5),
        RequestLengths(20, 29, 29),
        RequestLengths(8, 1, 1),
        RequestLengths(8, 1, 1),
    ]
    fit = compute_pool_capacity(pool, seats(), cycle(lengths))
    assert (fit.num_fit, fit.num_rejected, fit.num_slots_held) == (3, 2, 48)
    none = compute_pool_capacity(pool, seats(), repeat(lengths[1]))
    assert none.num_fit == 0
    assert none.error is not None
    assert "the largest piece of the arena of 12 blocks has 8" in none.error


def test_a_policy_that_cannot_start_has_an_error() -> None:
    plan = opt_plan(num_kv_blocks=12, max_model_len=160)
    reasons = {each.fit.pool.name: each.fit.error for each in plan.policies}
    assert plan.fit.num_fit == 1
    assert "max_model_len=160 exceeds the 128 tokens" in str(reasons["max, buddy"])
    assert reasons["max, first-fit"] is None


def test_draws_are_seeded_bounded_and_different() -> None:
    uniform = parse_lengths("uniform:1..50")
    load = PlannedWorkload(input_len=uniform, output_len=uniform, max_tokens=parse_lengths("uniform:1..90"), seed=3)
    drawn = list(islice(load.lengths(64), 3000))
    assert drawn == list(islice(load.lengths(64), 3000))
    assert drawn != list(islice(replace(load, seed=4).lengths(64), 3000))
    assert all(n <= m and p + m <= 64 for p, n, m in drawn)
    assert any(n < m for _, n, m in drawn)
    plan = opt_plan(PlannedWorkload(input_len=uniform, output_len=uniform), num_kv_blocks=60)
    paged = plan.policies[0]
    assert paged.fit == plan.fit
    assert paged.draws[0] == plan.fit.num_fit
    assert min(paged.draws) < max(paged.draws)


def test_times_are_those_of_the_cost_model() -> None:
    plan = opt_plan(num_kv_blocks=200, max_num_batched_tokens=64)
    speed = plan.speed
    assert speed is not None
    assert speed.batch_size == plan.fit.num_running == 20
    cost = KernelRoofline(ModelShape("opt-13b", OPT_13B.config), A100)
    assert speed.itl == cost.seconds(StepShape(20, 20, 20, 20 * 130, 20 * 130))
    assert speed.itl_longest == cost.seconds(StepShape(20, 20, 20, 20 * 159, 20 * 159))
    chunks = [StepShape(64, 1, 0, 64, 64 * 65 // 2), StepShape(36, 1, 1, 100, 36 * 64 + 36 * 37 // 2)]
    assert speed.ttft_alone == pytest.approx(sum(map(cost.seconds, chunks)))
    assert speed.run.num_answered == 80
    assert speed.ttft_alone is not None
    assert speed.run.ttft is not None
    assert speed.run.ttft.p50 > speed.ttft_alone


def test_rare_requests_have_the_ttft_of_an_idle_engine() -> None:
    plan = opt_plan(
        PlannedWorkload(input_len=parse_lengths("fixed:100"), output_len=parse_lengths("fixed:4"), request_rate=0.01),
        num_kv_blocks=200,
    )
    assert plan.speed is not None
    assert plan.speed.run.ttft is not None
    assert plan.speed.run.ttft.p50 == pytest.approx(plan.speed.ttft_alone)


def test_an_unknown_device_has_no_predicted_speed() -> None:
    config = EngineConfig(device="cuda", num_kv_blocks=40, dtype="float32")
    assert make_plan(OPT_13B, config, FIXED).speed is None
    notes = make_plan(OPT_13B, config, FIXED, hardware=A100).notes
    assert any("is for 2-byte values, and float32 has 4" in note for note in notes)
