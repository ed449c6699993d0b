"""Requests with different LoRA adapters in one batch get the greedy tokens of the merged models."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, AsyncLLM, EngineConfig, LoRARequest, SamplingParams
from chairlift.engine.async_llm import Generation
from chairlift.engine.lora_adapters import AdapterNames
from chairlift.engine.process.process_client import ProcessClient
from chairlift.errors import ConfigError, EngineDeadError, ModelLoadError, RequestError
from support.case_loop import loop_over
from support.lora_adapters import VARIANTS, merged_model, write_adapter
from support.native import needs_native, unavailable_reason
from support.process_engines import faulty, started
from support.waiting import AMPLE_SECONDS, until

NEW_TOKENS = 10
LONG_TOKENS = 16_000
"""The output of a request that outlives a test: with steps of 10 ms it takes longer than AMPLE_SECONDS."""

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
SQUEEZES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 7, "max_num_seqs": 6},
    "preempted": {"num_kv_blocks": 24, "block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 8},
    "prompt lookup": {"speculative_config": {"method": "ngram"}},
}


def make_prompts() -> list[list[int]]:
    """Prompts that share a prefix of several blocks, so that the prefix cache could mix adapters up."""
    draw = random.Random(3)
    common = [draw.randrange(3, 256) for _ in range(33)]
    return [[*common, 9], [*common[:17], 4, 5], common[:3]]


@pytest.fixture(scope="module")
def model(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir("llama", max_position_embeddings=LONG_TOKENS + 400)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        f"adapter-{index}": str(write_adapter(model, folder / str(index), index, **variant))
        for index, variant in enumerate(VARIANTS)
    }


@pytest.fixture(scope="module")
def expected(model: Path, adapters: dict[str, str]) -> dict[str | None, list[list[int]]]:
    return answers_of_merged_models(model, adapters)


def answers_of_merged_models(model: Path, adapters: dict[str, str]) -> dict[str | None, list[list[int]]]:
    """The answers of transformers with merged weights, one prompt at a time."""
    answers: dict[str | None, list[list[int]]] = {}
    for name, path in (*adapters.items(), (None, None)):
        merged = merged_model(model, None if path is None else Path(path))
        answers[name] = []
        for prompt in make_prompts():
            output = merged.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            answers[name].append(output[0, len(prompt) :].tolist())
    assert len({str(found) for found in answers.values()}) == len(answers)
    return answers


def options(model: Path, **others: Any) -> dict[str, Any]:
    return {"model": str(model), "skip_tokenizer_init": True, "num_threads": 1, "num_kv_blocks": 400, **others}


def answers_of(llm: LLM, names: list[str | None]) -> dict[str | None, list[list[int]]]:
    """The answers to all prompts with all adapters, in one run."""
    work = [(name, prompt) for prompt in make_prompts() for name in names]
    outputs = llm.generate(
        [prompt for _, prompt in work], GREEDY, lora_request=[name for name, _ in work], use_tqdm=False
    )
    found: dict[str | None, list[list[int]]] = {name: [] for name in names}
    for (name, _), output in zip(work, outputs, strict=True):
        found[name].append(output.outputs[0].token_ids)
    return found


@pytest.mark.parametrize(
    ("squeeze", "kernels"),
    [("preempted", "torch"), *(pytest.param(squeeze, "native", marks=needs_native) for squeeze in SQUEEZES)],
)
def test_mixed_adapters_give_the_tokens_of_merged_models(
    squeeze: str, kernels: str, model: Path, adapters: dict[str, str], expected: dict[str | None, list[list[int]]]
) -> None:
    llm = LLM(**options(model, kernels=kernels, kv_cache_dtype="float32", lora_modules=adapters, **SQUEEZES[squeeze]))
    names = [*adapters, None]
    assert answers_of(llm, names) == expected
    assert answers_of(llm, names[::-1]) == expected  # from the prefix cache
    assert llm.engine.core.scheduler.is_idle


@loop_over("arch", ["lfm2", "qwen3_5", "granite4_h"])
def test_recurrent_states_belong_to_an_adapter(arch: str, tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model_dir(arch)
    adapters = {
        f"adapter-{seed}": str(
            write_adapter(
                model, tmp_path / f"{arch}{seed}", seed, target_modules="all-linear", r=4 + seed, lora_alpha=8
            )
        )
        for seed in (0, 1)
    }
    expected = answers_of_merged_models(model, adapters)
    native = [] if unavailable_reason() else [("native", "chunked"), ("native", "prompt lookup")]
    for kernels, squeeze in [("torch", "preempted"), *native]:
        further = {"block_size": 4, "lora_modules": adapters, "kv_cache_dtype": "float32", **SQUEEZES[squeeze]}
        llm = LLM(**options(model, kernels=kernels, **further))
        for _ in range(2):  # The second time from the prefix cache.
            assert answers_of(llm, [*adapters, None]) == expected


def test_an_adapter_that_is_loaded_again_does_not_hit_the_blocks_of_the_earlier_one(
    model: Path, adapters: dict[str, str], expected: dict[str | None, list[list[int]]]
) -> None:
    llm = LLM(**options(model, max_loras=1, kv_cache_dtype="float32"))
    first, second = list(adapters)[:2]
    for name in (first, second, first):
        llm.load_lora_adapter("same", adapters[name])
        assert answers_of(llm, ["same", None]) == {"same": expected[name], None: expected[None]}
        assert answers_of(llm, ["same"]) == {"same": expected[name]}
        llm.unload_lora_adapter("same")
    with pytest.raises(RequestError, match="lora_name='same' is not loaded; the loaded adapters are: none"):
        llm.generate([[5, 6]], GREEDY, lora_request="same", use_tqdm=False)


def test_an_engine_without_memory_for_adapters_names_the_option() -> None:
    with pytest.raises(RequestError, match=r"\(0 adapters are loaded\): start the engine with a larger --max-loras"):
        AdapterNames([], 0).check_new("sql", "./sql")


def test_a_lora_request_loads_its_adapter_at_its_first_use(
    model: Path, adapters: dict[str, str], expected: dict[str | None, list[list[int]]]
) -> None:
    llm = LLM(**options(model, max_loras=1, kv_cache_dtype="float32"))
    prompt, request = make_prompts()[0], LoRARequest("sql", 7, adapters["adapter-0"])
    for _ in range(2):
        (output,) = llm.generate(prompt, GREEDY, lora_request=request, use_tqdm=False)
        assert output.outputs[0].token_ids == expected["adapter-0"][0]
    with pytest.raises(RequestError, match="is loaded from"):
        llm.generate(prompt, GREEDY, lora_request=LoRARequest("sql", 7, adapters["adapter-1"]), use_tqdm=False)
    with pytest.raises(RequestError, match=r"max_loras=1 does not allow another LoRA adapter \(1 adapter is loaded\)"):
        llm.generate(prompt, GREEDY, lora_request=LoRARequest("two", 8, adapters["adapter-1"]), use_tqdm=False)
    with pytest.raises(RequestError, match="lora_request has 2 entries for 1 prompts"):
        llm.generate(prompt, GREEDY, lora_request=[None, None], use_tqdm=False)
    with pytest.raises(RequestError, match="lora_request must be a LoRARequest"):
        llm.generate(prompt, GREEDY, lora_request=5, use_tqdm=False)  # type: ignore[arg-type]


def test_options_that_do_not_fit_are_rejected(model: Path, adapters: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="lora_modules has 8 adapters, but max_loras=2"):
        EngineConfig(lora_modules=adapters, max_loras=2)
    with pytest.raises(ConfigError, match="lora_modules must have a path for each name"):
        EngineConfig(lora_modules={"a": ""})
    with pytest.raises(ConfigError, match="max_lora_rank must be at least 1, got 0"):
        EngineConfig(max_lora_rank=0)
    with pytest.raises(ModelLoadError, match=r"adapter 'adapter-0': .* has rank 8, but max_lora_rank=4: increase"):
        LLM(**options(model, lora_modules={"adapter-0": adapters["adapter-0"]}, max_lora_rank=4))


def make_async(kind: str, folder: Path, **engine_options: Any) -> AsyncLLM:
    """An engine whose steps take 10 ms longer, so that a request of LONG_TOKENS outlives a test."""
    config = EngineConfig(**engine_options)
    if kind == "process":
        return AsyncLLM(client=started(config, faulty("none", 0, folder)))
    llm = AsyncLLM(config)
    executor = llm.engine.core._executor  # type: ignore[attr-defined]
    submit = executor.submit

    def slow_submit(output: Any) -> Any:
        time.sleep(0.01)
        return submit(output)

    executor.submit = slow_submit
    return llm


async def collect(llm: AsyncLLM, prompt: list[int], name: str | None, params: SamplingParams = GREEDY) -> list[int]:
    output = await llm.start(None, prompt, params, lora_name=name).collect()
    return output.outputs[0].token_ids


async def take(generation: Generation) -> list[int]:
    """The first tokens of a request that goes on."""
    tokens: list[int] = []
    while len(tokens) < NEW_TOKENS:
        tokens += (await anext(generation)).outputs[0].token_ids
    return tokens[:NEW_TOKENS]


@pytest.mark.parametrize("kind", ["thread", "process"])
async def test_adapters_are_loaded_and_unloaded_while_requests_run(
    kind: str, model: Path, adapters: dict[str, str], expected: dict[str | None, list[list[int]]], tmp_path: Path
) -> None:
    llm = make_async(kind, tmp_path, **options(model, num_kv_blocks=1100, max_loras=2, kv_cache_dtype="float32"))
    prompt = make_prompts()[0]
    long = SamplingParams(temperature=0, max_tokens=LONG_TOKENS, ignore_eos=True)

    background = llm.start(None, prompt, long)
    await llm.load_lora_adapter("x", adapters["adapter-0"])
    with pytest.raises(RequestError, match=r"lora_name='x' is loaded from .*: unload it first"):
        await llm.load_lora_adapter("x", adapters["adapter-1"])
    with pytest.raises(RequestError, match=r"adapter 'bad': .*adapter_config.json: No such file") as error:
        await llm.load_lora_adapter("bad", str(model))
    assert error.value.param == "lora_path"
    assert await collect(llm, prompt, "x") == expected["adapter-0"][0]
    running = llm.start(None, prompt, long, lora_name="x")
    unloading = asyncio.ensure_future(llm.unload_lora_adapter("x"))
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="lora_name='x' is not loaded"):
        llm.start(None, prompt, GREEDY, lora_name="x")
    await llm.load_lora_adapter("x", adapters["adapter-1"])
    assert not unloading.done()
    with pytest.raises(RequestError, match="1 is in use until the last request ends"):
        await llm.load_lora_adapter("y", adapters["adapter-2"])
    assert await collect(llm, prompt, "x") == expected["adapter-1"][0]
    assert await take(running) == expected["adapter-0"][0]
    assert not unloading.done()
    running.abort()
    await asyncio.wait_for(unloading, AMPLE_SECONDS)
    await llm.load_lora_adapter("y", adapters["adapter-2"])
    assert await collect(llm, prompt, "y") == expected["adapter-2"][0]
    assert [module.lora_name for module in llm.engine.adapters] == ["x", "y"]
    assert await take(background) == expected[None][0]
    background.abort()
    await llm.aclose()
    with pytest.raises(EngineDeadError):
        await llm.load_lora_adapter("z", adapters["adapter-3"])


async def test_a_restarted_engine_has_the_same_adapters(
    model: Path, adapters: dict[str, str], expected: dict[str | None, list[list[int]]], tmp_path: Path
) -> None:
    """It continues with an event log of its own."""
    further = {"max_loras": 3, "kv_cache_dtype": "float32", "event_log": tmp_path / "log.jsonl"}
    client = ProcessClient(EngineConfig(**options(model, lora_modules={"a": adapters["adapter-0"]}, **further)))
    client.wait_until_ready()
    llm = AsyncLLM(client=client)
    prompt = make_prompts()[0]

    await llm.load_lora_adapter("b", adapters["adapter-1"])
    assert await collect(llm, prompt, "a") == expected["adapter-0"][0]
    client._child.kill()
    await until(lambda: llm.status().restarts > 0)
    found = await asyncio.gather(*(collect(llm, prompt, name) for name in ("a", "b", None)))
    assert found == [expected["adapter-0"][0], expected["adapter-1"][0], expected[None][0]]
    await llm.unload_lora_adapter("a")
    await llm.load_lora_adapter("c", adapters["adapter-2"])
    assert await collect(llm, prompt, "c") == expected["adapter-2"][0]
    await llm.aclose()
    assert {path.name for path in tmp_path.glob("log*")} == {"log.jsonl", "log.1.jsonl"}
