"""Models with recurrent layers give the same tokens and the same bits of state however their requests are computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.core.kv.checkpointed_prefixes import CheckpointedPrefixes
from chairlift.core.speculation.prompt_lookup import PromptLookup, Proposal
from chairlift.engine.startup import decoder_engine
from chairlift.engine.startup.decoder_engine import prepare_decoder
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.engine.startup.loaded_model import LoadedDecoder, load_model
from chairlift.engine.startup.memory_plan import plan_memory
from chairlift.errors import ConfigError
from chairlift.events import EventList, RequestFinished, Step
from chairlift.models.decoder import DecoderModel
from chairlift.outputs import NewRequest, SchedulerOutput
from chairlift.worker.disk_block_store import DiskBlockStore
from support.fakes import collect, make_request, run_to_end
from support.kv_invariants import check_manager
from support.native import needs_native
from support.shared_models import shared_model
from support.tiny_models import architectures_with

KERNEL_SETS = ["torch", pytest.param("native", marks=needs_native)]
KINDS = ["granite4_h", "lfm2", "qwen3_5"]
"""An architecture of each kind of state."""

OTHERS = ["lfm2_moe", "olmo_hybrid"]
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


def generate(
    folder: Path, n: int = 1, temperature: float = 0, repeats: int = 2, **options: Any
) -> tuple[list[list[int]], list[Any]]:
    """The tokens of all prompts, `repeats` times, and the events."""
    config, events = make_config(folder, **options), EventList()
    llm = LLM(engine=build_engine(config, loaded=shared_model(config), events=events))
    params = SamplingParams(temperature=temperature, max_tokens=NEW_TOKENS, ignore_eos=True, n=n, seed=7)
    outputs = llm.generate(prompts() * repeats, params, use_tqdm=False)
    llm.close()
    return [each.token_ids for output in outputs for each in output.outputs], events.events


@pytest.mark.parametrize(
    ("arch", "kernels"),
    [
        *((arch, "torch") for arch in KINDS),
        *(pytest.param(arch, "native", marks=needs_native) for arch in architectures_with("states")),
    ],
)
def test_tokens_do_not_depend_on_how_requests_are_computed(
    arch: str, kernels: str, tiny_model_dir: Callable[..., Path]
) -> None:
    folder = tiny_model_dir(arch)
    once, _ = generate(folder, repeats=1, kernels=kernels, max_num_seqs=1, enable_prefix_caching=False)
    alone = once * 2
    chunked, events = generate(folder, kernels=kernels, max_num_batched_tokens=9)
    assert chunked == alone
    assert sum(e.num_cached_tokens > 0 for e in events if isinstance(e, RequestFinished)) >= len(prompts())
    if kernels == "torch":  # `test_engine_parity.py` preempts with torch's kernels.
        return
    preempted, events = generate(folder, kernels=kernels, num_kv_blocks=40, max_num_batched_tokens=32)
    assert preempted == alone
    assert sum(len(e.preempted) for e in events if isinstance(e, Step)) > 0
    if arch not in KINDS:  # Groups and policies are run once for each kind of state.
        return
    siblings, _ = generate(folder, n=3, repeats=1, kernels=kernels)
    assert siblings == [tokens for tokens in once for _ in range(3)]
    for policy in ({"batching": "static"}, {"kv": "exact"}, {"kv": "pow2"}):
        assert generate(folder, repeats=1, kernels=kernels, **policy)[0] == once


@pytest.mark.usefixtures("all_drafts")
@pytest.mark.parametrize("arch", OTHERS)
def test_other_architectures_give_the_same_tokens_too(
    arch: str, tiny_model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several ways at a time: in chunks with the prefix cache, preempted with draft tokens, and after a restart."""
    folder = tiny_model_dir(arch)
    monkeypatch.setattr(DiskBlockStore, "_is_worth_reading", lambda *_: True)
    once, _ = generate(folder, repeats=1, max_num_seqs=1, enable_prefix_caching=False)
    alone = once * 2
    chunked, events = generate(folder, max_num_batched_tokens=9, prefix_cache_dir=tmp_path)
    assert chunked == alone
    assert sum(e.num_cached_tokens > 0 for e in events if isinstance(e, RequestFinished)) >= len(prompts())
    restarted, events = generate(folder, max_num_seqs=2, prefix_cache_dir=tmp_path)
    assert restarted == alone
    first = min((e for e in events if isinstance(e, RequestFinished)), key=lambda e: e.request_id)
    assert first.num_cached_tokens > 0
    known = KnownAnswers(alone)
    monkeypatch.setattr(PromptLookup, "propose", lambda _, tokens, count: known.propose(tokens, count))
    crowd = {"max_num_seqs": 24, "num_kv_blocks": 60, "max_num_batched_tokens": 32}
    drafting, events = generate(folder, speculative_config={"method": "ngram"}, **crowd)
    assert drafting == alone
    steps = [event for event in events if isinstance(event, Step)]
    assert 0 < sum(step.num_accepted for step in steps) < sum(sum(step.num_draft) for step in steps)
    assert any(step.preempted for step in steps)


def compute_state(engine: Engine, prompt: list[int], bounds: list[int]) -> list[torch.Tensor]:
    """The states of a prompt that is computed in chunks with these ends."""
    assert isinstance(engine.loaded, LoadedDecoder)
    runner: Any = engine.core._executor
    blocks = [list(range(-(-len(prompt) // 4)))]
    new = [NewRequest("a", prompt, len(prompt), 0, blocks, SamplingParams(temperature=0), 0, [])]
    for step, (start, end) in enumerate(zip([0, *bounds], bounds, strict=False)):
        runner.result(runner.submit(SchedulerOutput(step, {"a": end - start}, new)))
        new = []
    slot = runner._rows.state_slots[runner._rows.row_of("a")]
    runner.submit(SchedulerOutput(len(bounds), {}, removed=["a"]))
    return read_state(engine.loaded.model, slot)


def read_state(model: DecoderModel, slot: int) -> list[torch.Tensor]:
    layers = [layer.recurrence for layer in model.layers if layer.recurrence is not None]
    return [part[slot].clone() for layer in layers for part in layer.state if part is not None]


@needs_native
@pytest.mark.parametrize("arch", architectures_with("states"))
def test_24_divisions_of_a_prompt_give_the_same_bits_of_state(arch: str, tiny_model_dir: Callable[..., Path]) -> None:
    engine = build_engine(make_config(tiny_model_dir(arch), kernels="native", max_num_batched_tokens=100))
    rng = random.Random(2)
    prompt = [rng.randrange(3, 250) for _ in range(97)]
    expected = compute_state(engine, prompt, [97])
    assert any(part.abs().sum() > 0 for part in expected)
    for _ in range(24):
        bounds = [*sorted(rng.sample(range(1, 97), rng.randint(1, 12))), 97]
        assert all(map(torch.equal, compute_state(engine, prompt, bounds), expected))


@pytest.fixture
def all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens are verified whether they pay or not."""
    monkeypatch.setattr(decoder_engine, "measured_row_time", lambda *_: None)


class KnownAnswers:
    """Proposes the next tokens of known answers, of which one in four is wrong."""

    def __init__(self, answers: list[list[int]]) -> None:
        self.sequences = [prompt + answer for prompt, answer in zip([*prompts(), *prompts()], answers, strict=True)]
        self.random = random.Random(5)

    def propose(self, token_ids: list[int], max_tokens: int) -> Proposal | None:
        known = next(each for each in self.sequences if each[: len(token_ids)] == token_ids)
        tokens = known[len(token_ids) :][:max_tokens]
        return Proposal([t ^ (self.random.random() < 0.25) for t in tokens], 4) if tokens else None


@needs_native
@pytest.mark.usefixtures("all_drafts")
@pytest.mark.parametrize("arch", KINDS)
def test_tokens_do_not_depend_on_draft_tokens(
    arch: str, tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, worse = tiny_model_dir(arch), worse_model(arch, tiny_model_dir)
    model = {"speculative_config": {"model": str(worse)}}
    crowd = {"num_kv_blocks": 60, "max_num_batched_tokens": 32}
    runs: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 24}, {"batching": "static"}, {"n": 2}, crowd]
    for temperature, chosen in (
        (0.0, [*runs, crowd | model]),
        (0.9, [{"enable_prefix_caching": False}, crowd | model]),
    ):
        plain, _ = generate(folder, temperature=temperature)
        answers = KnownAnswers(plain)
        monkeypatch.setattr(
            PromptLookup, "propose", lambda _, tokens, count, known=answers: known.propose(tokens, count)
        )
        for options in chosen:
            drafting, events = generate(
                folder,
                temperature=temperature,
                **{"max_num_seqs": 24, "speculative_config": {"method": "ngram"}, **options},
            )
            n = options.get("n", 1)
            assert drafting == [tokens for tokens in plain for _ in range(n)]
            steps = [event for event in events if isinstance(event, Step)]
            assert 0 < sum(step.num_accepted for step in steps) < sum(sum(step.num_draft) for step in steps)
            assert not crowd.keys() <= options.keys() or any(step.preempted for step in steps)


@pytest.mark.usefixtures("all_drafts")
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_tokens_do_not_depend_on_the_predictor(kernels: str, tiny_model_dir: Callable[..., Path]) -> None:
    folder = tiny_model_dir("qwen3_5", mtp_num_hidden_layers=1)
    crowd = {"num_kv_blocks": 60, "max_num_batched_tokens": 32}
    runs: list[dict[str, Any]] = [crowd, {}, {"max_num_batched_tokens": 24}, {"enable_prefix_caching": False}]
    runs += [{"batching": "static"}, {"n": 2}]
    for temperature, chosen in ((0.0, runs), (0.9, runs[:2])) if kernels == "native" else ((0.0, runs[:1]),):
        plain, _ = generate(folder, temperature=temperature, kernels=kernels)
        for options in chosen:
            mtp = {"max_num_seqs": 24, "speculative_config": {"method": "mtp"}, **options}
            drafting, events = generate(folder, temperature=temperature, kernels=kernels, **mtp)
            assert drafting == [tokens for tokens in plain for _ in range(options.get("n", 1))]
            steps = [event for event in events if isinstance(event, Step)]
            assert 0 < sum(step.num_accepted for step in steps) < sum(sum(step.num_draft) for step in steps)
            assert options != crowd or any(step.preempted for step in steps)


@pytest.mark.usefixtures("all_drafts")
@pytest.mark.parametrize("arch", KINDS)
def test_aborts_while_draft_tokens_are_computed_leave_nothing_behind(
    arch: str, tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model_dir(arch)
    plain, _ = generate(folder)
    known = KnownAnswers(plain)
    monkeypatch.setattr(PromptLookup, "propose", lambda _, tokens, count: known.propose(tokens, count))
    core = build_engine(make_config(folder, speculative_config={"method": "ngram"})).core
    executor, manager = core._executor, core.scheduler._kv
    assert isinstance(manager.prefixes, CheckpointedPrefixes)
    for number, prompt in enumerate(prompts()):
        core.add(make_request(str(number), prompt, NEW_TOKENS))
    answers: dict[str, list[int]] = {}
    aborted: list[str] = []
    while (output := core.scheduler.schedule(core.now())) is not None:
        handle = executor.submit(output)
        with_checkpoint = [name for name in output.draft_token_ids if name in output.checkpoints]
        if with_checkpoint and len(aborted) < 3:
            aborted.append(with_checkpoint[0])
            assert core.abort(aborted[-1])
        collect(core.scheduler.update(executor.result(handle), core.now()), answers)
        check_manager(manager)
    assert len(aborted) == 3
    assert all(answers[str(n)] == plain[n] for n in range(len(prompts())) if str(n) not in aborted)
    assert manager.num_free_blocks == manager.num_blocks
    assert not manager.prefixes._states
    assert manager.prefixes.checkpoints.num_used == len(manager.prefixes.checkpoints._index)
    for name in aborted:
        core.add(make_request(f"{name} again", prompts()[int(name)], NEW_TOKENS))
    again = run_to_end(core)
    assert again == {f"{name} again": plain[int(name)] for name in aborted}


def worse_model(arch: str, tiny_model_dir: Callable[..., Path]) -> Path:
    """A model whose tokens are often those of the other one, for a draft model."""
    return tiny_model_dir(arch, **{"norm_eps" if arch == "lfm2" else "rms_norm_eps": 0.01})


@pytest.mark.usefixtures("all_drafts")
@pytest.mark.parametrize("arch", KINDS)
def test_any_acceptance_leaves_the_bits_of_state_of_plain_decoding(
    arch: str, tiny_model_dir: Callable[..., Path]
) -> None:
    """Of both models, after each step, with draft tokens that a prompt lookup or a worse model proposes."""
    folder, worse = tiny_model_dir(arch), worse_model(arch, tiny_model_dir)
    engine = build_engine(make_config(folder, speculative_config={"model": str(worse)}))
    plain, draft = build_engine(make_config(folder)), build_engine(make_config(worse))
    assert isinstance(engine.loaded, LoadedDecoder)
    assert engine.loaded.draft is not None
    models = engine.loaded.model, engine.loaded.draft.model
    runner: Any = engine.core._executor
    prompt = prompts()[0]
    (output,) = LLM(engine=plain).generate(
        [prompt], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), use_tqdm=False
    )
    known = prompt + output.outputs[0].token_ids

    @given(st.lists(st.tuples(st.booleans(), st.lists(st.booleans(), max_size=4)), min_size=1, max_size=6))
    @settings(max_examples=12, deadline=None)
    def check(steps: list[tuple[bool, list[bool]]]) -> None:
        blocks = [list(range(40))]
        new = [NewRequest("a", prompt, len(prompt), 0, blocks, SamplingParams(temperature=0), 0, [])]
        runner.submit(SchedulerOutput(0, {"a": len(prompt)}, new))
        row = runner._rows.row_of("a")
        for number, (is_model, are_right) in enumerate(steps):
            length = int(runner._rows.num_tokens[row])
            drafts = [t if right else t ^ 1 for t, right in zip(known[length:], are_right, strict=False)]
            proposal = {"a": len(drafts)} if is_model and drafts else {}
            given_drafts = {"a": drafts} if not is_model and drafts else {}
            scheduled = {"a": 1 + len(drafts)}
            runner.submit(
                SchedulerOutput(number + 1, scheduled, draft_token_ids=given_drafts, num_draft_tokens=proposal)
            )
            num_computed = int(runner._rows.num_computed_tokens[row])
            assert num_computed == runner._rows.num_tokens[row] - 1
            own = runner._rows, num_computed, models[0], plain
            drafter = runner._proposer
            other = drafter._view(), int(drafter._num_computed[row]), models[1], draft
            for rows, count, model, reference in (own, other):
                if count:
                    expected = compute_state(reference, known[:count], [count])
                    assert all(map(torch.equal, read_state(model, rows.state_sources[row]), expected))
        assert sorted([*runner._rows.state_slots, *runner._rows.draft_slots]) == list(
            range(runner._rows.first_checkpoint)
        )
        runner.submit(SchedulerOutput(len(steps) + 1, {}, removed=["a"]))

    check()


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


def test_the_budget_holds_the_states_of_draft_tokens_in_both_models(tiny_model_dir: Callable[..., Path]) -> None:
    budget, folder = 4 << 20, tiny_model_dir("nemotron_h")
    options: dict[str, Any] = {"num_kv_blocks": None, "kv_cache_memory_bytes": budget, "max_num_seqs": 2}
    config = make_config(folder, **options, speculative_config={"num_speculative_tokens": 5})
    engine = build_engine(config)
    assert isinstance(engine.loaded, LoadedDecoder)
    assert engine.facts.kv_cache_plan.num_draft_states == 5
    assert engine.facts.kv_cache_plan == plan_memory(config, engine.loaded.config, engine.loaded.formats, None).pool
    assert engine.loaded.row_time is not None
    assert list(engine.loaded.row_time.points) == [1, 2, 4], "a step has no more states"
    drafting = build_engine(make_config(folder, **options, speculative_config={"model": str(folder)}))
    assert isinstance(drafting.loaded, LoadedDecoder)
    assert drafting.loaded.draft is not None
    plan, parts = drafting.facts.kv_cache_plan, 0
    for model in (drafting.loaded.model, drafting.loaded.draft.model):
        layers = [layer.recurrence for layer in model.layers if layer.recurrence is not None]
        parts += sum(part.nbytes for layer in layers for part in layer.state if part is not None)
    assert parts == plan.running_state_bytes + plan.num_checkpoints * plan.state_bytes
    assert plan.num_bytes <= budget


def test_options_without_a_meaning_are_errors(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model_dir("nemotron_h")
    loaded = load_model(make_config(folder))
    assert isinstance(loaded, LoadedDecoder)
    cases: dict[str, dict[str, Any]] = {
        "set it to at least": {"prefix_cache_dir": tmp_path, "prefix_cache_disk_bytes": 1000},
        "lower max_num_seqs": {"num_kv_blocks": None, "kv_cache_memory_bytes": 1 << 16, "max_num_seqs": 64},
    }
    for message, options in cases.items():
        with pytest.raises(ConfigError, match=message):
            prepare_decoder(make_config(folder, **options), loaded, None)
