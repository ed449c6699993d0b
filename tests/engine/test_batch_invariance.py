"""With native kernels the logits of a request do not depend on other requests, to the last bit.

Crowds of any kind, under every batching mode and KV policy, in any chunks, blocks, pools, numbers of threads, orders of
work and instruction sets, compared with each request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from chairlift.config import KV_POLICIES, EngineConfig
from chairlift.engine.startup.loaded_model import load_model
from chairlift.kernels.attention import AttentionMetadata
from chairlift.kernels.cpu import load
from chairlift.kernels.cpu.attention import NativeAttention, NativeAttentionPlan
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.kv_layout import KVLayout
from support.native import needs_native, unavailable_reason
from support.request_runner import SAMPLING, RequestRunner, RequestSpec

pytestmark = needs_native

ISAS = [] if unavailable_reason() else load().available_isas()
MAX_EXAMPLES = 2
SPARE_BLOCKS = 40


@dataclass(frozen=True)
class Case:
    """A tiny model with its formats of weights and KV memory."""

    arch: str
    quantization: str | None = None
    kv_cache_dtype: str = "bfloat16"
    overrides: dict[str, Any] = field(default_factory=dict)
    load_format: str = "auto"


LONG = {"max_position_embeddings": 2048}
CASES = {
    "llama, grouped heads, f32": Case("llama", kv_cache_dtype="float32"),
    "llama, tied heads, int8": Case("llama", "int8", "int8", {"tie_word_embeddings": True}),
    "llama, odd sizes, q4_1": Case(
        "llama", "q4_1", overrides={"hidden_size": 72, "head_dim": 12, "intermediate_size": 100, "vocab_size": 259}
    ),
    "llama, eight heads on one, biases, q8_0": Case(
        "llama3",
        "q8_0",
        overrides={"num_attention_heads": 8, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral, window within a tile, q4_0": Case("mistral", "q4_0", "int8"),
    "qwen2, as many heads of K, q8_0": Case("qwen2", "q8_0", overrides={"num_key_value_heads": 4}),
    "qwen3, norm on heads, int8": Case("qwen3", "int8", "float32", {"head_dim": 40}),
    "mixtral, q8_0": Case("mixtral", "q8_0", overrides={"hidden_size": 72, "head_dim": 12, "intermediate_size": 40}),
    "qwen3 with experts, int8": Case("qwen3_moe", "int8", "float32"),
    "deepseek with latents and groups of experts, q8_0": Case("deepseek_v3", "q8_0", "int8"),
    "opt, projections, q4_1": Case("opt", "q4_1", overrides={"word_embed_proj_dim": 32}),
    "opt, norm after, f32": Case("opt", kv_cache_dtype="int8", overrides={"do_layer_norm_before": False}),
}
LONG_CASES = {
    "llama, several splits, q8_0": Case("llama", "q8_0", overrides=LONG),
    "mistral, window across splits, f32": Case("mistral", None, "int8", {**LONG, "sliding_window": 600}),
}


@pytest.fixture(autouse=True)
def restore_kernels() -> Iterator[None]:
    native = load()
    isa, num_threads = native.isa(), native.num_threads()
    yield
    native.set_isa(isa)
    native.set_num_threads(num_threads)
    native.set_tile_order(0)


@dataclass(frozen=True)
class Limits:
    """The options of an engine; `spare_blocks` is the number of blocks beyond those of the largest request."""

    batching: str = "continuous"
    kv: str = "paged"
    enable_prefix_caching: bool = True
    max_num_seqs: int = 8
    budget_per_seq: int = 8
    block_size: int = 4
    spare_blocks: int = 0
    num_threads: int = 2
    tile_order: int = 0
    isa: str = ""
    speculates: bool = False

    def options(self, requests: list[RequestSpec], model: ModelConfig) -> dict[str, Any]:
        """The options of the engine. A pool whose size is a power of two has a buddy for every request."""
        longest = max(request.num_slots for request in requests)
        num_blocks = 1 << (-(-longest // self.block_size) - 1).bit_length()
        if self.kv == "paged":
            num_blocks *= len(KVLayout.by_window(model, model.max_position_embeddings).windows)
        return {
            "batching": self.batching,
            "kv": self.kv,
            "enable_prefix_caching": self.enable_prefix_caching if self.kv == "paged" else None,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_seqs * self.budget_per_seq,
            "max_model_len": longest,
            "block_size": self.block_size,
            "num_kv_blocks": num_blocks + self.spare_blocks,
            "speculative_config": {"method": "ngram"} if self.speculates and self.block_size > 1 else None,
        }

    def apply(self) -> None:
        load().set_isa(self.isa or ISAS[0])
        load().set_num_threads(self.num_threads)
        load().set_tile_order(self.tile_order)


limits_strategy = st.builds(
    Limits,
    batching=st.sampled_from(["continuous", "static"]),
    kv=st.sampled_from(KV_POLICIES),
    enable_prefix_caching=st.booleans(),
    max_num_seqs=st.integers(1, 9),
    budget_per_seq=st.integers(1, 40),
    block_size=st.integers(1, 70),
    spare_blocks=st.integers(0, SPARE_BLOCKS),
    num_threads=st.integers(1, 3),
    tile_order=st.integers(0, 1 << 32),
    isa=st.sampled_from(ISAS or [""]),
    speculates=st.booleans(),
)


def request_specs(low: int, high: int) -> st.SearchStrategy[RequestSpec]:
    return st.builds(
        RequestSpec,
        prompt_len=st.integers(low, high),
        max_tokens=st.integers(1, 20),
        stream=st.integers(0, 1),
        own=st.integers(0, 20),
        sampling=st.sampled_from(sorted(SAMPLING)),
        arrival=st.integers(0, 30),
        abort_after=st.none() | st.integers(1, 20),
    )


REQUESTS = [
    RequestSpec(20 + 3 * i, 14, stream=i % 2, own=2, sampling=name, arrival=i) for i, name in enumerate([*SAMPLING] * 2)
]
LIMITS = {
    "preemptions": Limits(),
    "padding": Limits("static", "exact", spare_blocks=SPARE_BLOCKS),
    "drafts": Limits(spare_blocks=SPARE_BLOCKS, block_size=16, budget_per_seq=20, speculates=True),
}
COUNTED = ("preemptions", "padding", "chunks", "prefix hits", "accepted drafts", "rejected drafts")


def make_runner(case: Case, tiny_model_dir: Callable[..., Path]) -> RequestRunner:
    config = EngineConfig(
        model=str(tiny_model_dir(case.arch, **case.overrides)),
        kernels="native",
        quantization=case.quantization,
        kv_cache_dtype=case.kv_cache_dtype,
        skip_tokenizer_init=True,
        num_kv_blocks=64,
        num_threads=1,
    )
    return RequestRunner(load_model(config))


def check(runner: RequestRunner, limits: Limits, requests: list[RequestSpec]) -> None:
    limits.apply()
    together = runner.run_together(requests, **limits.options(requests, runner.loaded.config))
    for index, (request, answer) in enumerate(zip(requests, together, strict=True)):
        assert (len(answer.tokens) == request.max_tokens) or request.abort_after is not None
        assert (difference := answer.first_difference(runner.run_alone(request))) is None, (
            f"request {index}, {difference}"
        )


@pytest.mark.parametrize("name", CASES)
def test_logits_do_not_depend_on_other_requests(name: str, tiny_model_dir: Callable[..., Path]) -> None:
    runner = make_runner(CASES[name], tiny_model_dir)

    @settings(max_examples=MAX_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @example(LIMITS["preemptions"], REQUESTS)
    @example(LIMITS["padding"], REQUESTS)
    @example(LIMITS["drafts"], REQUESTS)
    @given(limits_strategy, st.lists(request_specs(1, 90), min_size=1, max_size=9))
    def check_runs(limits: Limits, requests: list[RequestSpec]) -> None:
        check(runner, limits, requests)

    check_runs()
    counts = runner.counts
    assert all(counts[kind] for kind in COUNTED), counts


@pytest.mark.parametrize("name", LONG_CASES)
def test_logits_in_long_contexts_do_not_depend_on_other_requests(
    name: str, tiny_model_dir: Callable[..., Path]
) -> None:
    runner = make_runner(LONG_CASES[name], tiny_model_dir)

    @settings(max_examples=MAX_EXAMPLES // 2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(limits_strategy, st.lists(request_specs(500, 1300), min_size=1, max_size=3))
    def check_runs(limits: Limits, requests: list[RequestSpec]) -> None:
        check(runner, limits, requests)

    check_runs()


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
def test_logits_over_a_shared_prefix_do_not_depend_on_other_requests(
    kv_cache_dtype: str, tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that find their prefix in the cache compute its keys once, up to the last split and within it."""
    shared: list[int] = []

    def plan(self: NativeAttention, metadata: AttentionMetadata) -> NativeAttentionPlan:
        planned = original(self, metadata)
        shared.extend(planned.step.shared_keys)
        return planned

    original = NativeAttention.plan
    monkeypatch.setattr(NativeAttention, "plan", plan)
    runner = make_runner(Case("llama", "q8_0", kv_cache_dtype, LONG), tiny_model_dir)
    first = RequestSpec(800, 30, own=10)
    others = [RequestSpec(790 + i, 6, own=3 + i, sampling=name, arrival=12) for i, name in enumerate(SAMPLING)]
    check(runner, Limits(budget_per_seq=20, block_size=16, spare_blocks=300), [first, *others])
    assert max(shared) > 512
    assert max(shared) % 512 > 0


def test_logits_of_the_default_model_do_not_depend_on_other_requests(smollm2_gguf: Path) -> None:
    """The activations of this model have outliers, which the products compute separately."""
    config = EngineConfig(model=str(smollm2_gguf), kernels="native", skip_tokenizer_init=True, num_threads=2)
    runner = RequestRunner(load_model(config))
    requests = [
        RequestSpec(20 * i + 7, 8, stream=i % 2, own=5, sampling=name, arrival=i) for i, name in enumerate(SAMPLING)
    ]
    for isa in dict.fromkeys((ISAS[0], "avx2")) if "avx2" in ISAS else ISAS[:1]:
        limits = Limits(budget_per_seq=15, block_size=16, isa=isa, tile_order=99, speculates=isa == ISAS[0])
        check(runner, limits, requests)
