"""`LLM` and its records as scripts for vLLM use them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, AsyncLLM, CompletionOutput, EngineConfig, RequestOutput, SamplingParams, StructuredOutputs
from chairlift.engine.input_processor import NoTokenizer
from chairlift.engine.llm_outputs import LogprobDecoder
from chairlift.errors import ConfigError, ContextLengthError, RequestError
from chairlift.outputs import Logprob, ModelRunnerOutput, TokenLogprobs
from chairlift.sampling_params import MAX_BEAMS, BeamSearchParams
from support.case_loop import loop_over

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = "The capital of France is"
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1}


class Pieces:
    """A vocabulary of pieces of characters."""

    PIECES = (b"a", b" \xe2", b"\x82", b"\xac", b"x", b"\xff", b"\xe2\x82\xac \xe2", b"\x82\xacb")

    def token_bytes(self, token_id: int) -> bytes:
        return self.PIECES[token_id]


@pytest.fixture
def tiny(tiny_model_dir: Callable[..., Path]) -> LLM:
    return LLM(str(tiny_model_dir("llama")), num_kv_blocks=20, **OPTIONS)


def test_logprobs_of_all_tokens(llm: LLM) -> None:
    params = replace(GREEDY, max_tokens=2, logprobs=-1)
    (all_tokens, few) = llm.generate([PROMPT, PROMPT], [params, replace(params, logprobs=3)])
    for entries, some in zip(all_tokens.outputs[0].logprobs or [], few.outputs[0].logprobs or [], strict=True):
        assert sorted(entries) == list(range(49152))
        assert [*entries][:3] == [*some]
        assert sum(math.exp(entry.logprob) for entry in entries.values()) == pytest.approx(1, abs=1e-3)
    (output,) = llm.generate(PROMPT, replace(GREEDY, max_tokens=1, prompt_logprobs=-1))
    assert [entries and len(entries) for entries in output.prompt_logprobs or []] == [None, *[49152] * 4]


def test_logprobs_of_all_tokens_are_bounded_and_only_for_llm(llm: LLM) -> None:
    few, wide = replace(GREEDY, max_tokens=80, logprobs=1), replace(GREEDY, max_tokens=1, logprobs=-1)
    with pytest.raises(RequestError, match=r"prompt 1: logprobs: .* 7864480 entries .* at most 4194304 are allowed"):
        llm.generate([PROMPT] * 3, [few, few, wide])
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=f"^{name} must be between 0 and 20, got -1, which only LLM accepts"):
            llm.engine.input_processor.make("id", [5], SamplingParams(**{name: -1}), arrival_time=0)


def test_logprobs_have_the_limit_of_the_llm(tiny: LLM) -> None:
    limited = LLM(engine=tiny.engine, max_logprobs=2)
    assert len(limited.generate([[5]], replace(GREEDY, max_tokens=1, logprobs=2))) == 1
    for name, value in (("logprobs", 3), ("prompt_logprobs", -1)):
        with pytest.raises(RequestError, match=f"prompt 0: {name}={value} exceeds max_logprobs=2 of this LLM: lower"):
            limited.generate([[5]], replace(GREEDY, **{name: value}))
    with pytest.raises(ConfigError, match="max_logprobs must be between 0 and 20, or -1, got 21"):
        LLM(engine=tiny.engine, max_logprobs=21)


@loop_over("value", [-2, 21, -1.0, True, "1"])
def test_other_numbers_of_logprobs_are_errors(value: Any) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=f"{name} must be"):
            SamplingParams(**{name: value})


@loop_over(
    ("tokens", "texts"),
    [
        ([0, 1, 2, 3, 0], ["a", "", "", " €", "a"]),
        ([1, 0], ["", "a"]),
        ([5, 5, 0], ["", "", "a"]),
        ([6, 2, 3, 4], ["", "", "€ €", "x"]),
        ([1, 7], ["", "\ufffd\ufffdb"]),
    ],
)
def test_the_text_of_a_token_inside_a_character(tokens: list[int], texts: list[str]) -> None:
    others = [Logprob(4, -2.0, 2), Logprob(5, -3.0, 3)]
    positions = [TokenLogprobs(Logprob(token, -1.0, 1), others) for token in tokens]
    output = RequestOutput(
        "id", None, [5], [CompletionOutput(0, "", tokens, logprobs=positions)], True, prompt_logprobs=[None, *positions]
    )
    for decoder in (Pieces(), NoTokenizer()):
        decoded = LogprobDecoder(decoder).output(output)  # type: ignore[arg-type]
        assert decoded.prompt_logprobs == [None, *(decoded.outputs[0].logprobs or [])]
        for text, token, entries in zip(texts, tokens, decoded.outputs[0].logprobs or [], strict=True):
            is_text = isinstance(decoder, Pieces)
            assert entries[4].decoded_token == ("x" if is_text else None)
            if token not in (4, 5):
                assert entries[token] == (-1.0, 1, text if is_text else None)


def test_parameters_are_cloned_and_assigned(tiny: LLM) -> None:
    params = SamplingParams(logit_bias={5: 1.0}, stop_token_ids=[3], structured_outputs=StructuredOutputs(choice=["a"]))
    clone = params.clone()
    assert (clone, clone is params, clone.logit_bias is params.logit_bias) == (params, False, False)
    clone.max_tokens = 3  # type: ignore[misc]
    assert (clone.max_tokens, params.max_tokens) == (3, 16)
    with pytest.raises(RequestError, match="n must be between 1 and 128, got 0"):
        clone.n = 0  # type: ignore[misc]
    with pytest.raises(RequestError, match="max_token is not an option: did you mean max_tokens"):
        clone.max_token = 5  # type: ignore[attr-defined]
    clone.stop_token_ids = [4, 4]  # type: ignore[misc]
    assert (clone.n, clone.stop_token_ids) == (1, (4,))
    defaults = tiny.get_default_sampling_params()
    defaults.ignore_eos = True  # type: ignore[misc]
    for number in (2, 5):
        defaults.max_tokens = number  # type: ignore[misc]
        assert len(tiny.generate([7, 8], defaults)[0].outputs[0].token_ids) == number
    assert tiny.get_default_sampling_params().max_tokens == 16


def test_an_assignment_does_not_change_a_request_that_runs(tiny_model_dir: Callable[..., Path]) -> None:
    async def run() -> list[int]:
        engine = AsyncLLM(EngineConfig(model=str(tiny_model_dir("llama")), num_kv_blocks=20, **OPTIONS))
        params, lengths = GREEDY.clone(), []
        for number in (3, 6):
            params.max_tokens = number  # type: ignore[misc]
            lengths.append(sum([len(delta.outputs[0].token_ids) async for delta in engine.generate([5, 6], params)]))
        engine.close()
        return lengths

    assert asyncio.run(run()) == [3, 6]


def test_prompts_run_in_the_order_of_their_priorities(tiny_model_dir: Callable[..., Path]) -> None:
    llm = LLM(str(tiny_model_dir("llama")), num_kv_blocks=20, max_num_seqs=1, scheduling_policy="priority", **OPTIONS)
    prompts = [[5, 6], [7, 8], [9, 10]]
    outputs = llm.generate(prompts, GREEDY, priority=[3, 1, 2])
    starts = [output.times and output.times.first_scheduled for output in outputs]
    assert sorted(range(3), key=lambda index: starts[index] or 0) == [1, 2, 0]
    assert len(llm.generate(prompts, GREEDY, priority=4)) == 3


@loop_over(
    ("priority", "message"),
    [
        ([0, 1], "prompt 1: priority=1 has no effect under this --scheduling-policy"),
        ([1], "priority has 1 entries for 2 prompts"),
        ("high", "priority must be an integer, a list .* got str: 'high'"),
        ([0, True], "priority must be an integer, a list .* got bool: True"),
    ],
)
def test_invalid_priorities_are_named(priority: Any, message: str, tiny: LLM) -> None:
    with pytest.raises(RequestError, match=message):
        tiny.generate([[5], [6]], GREEDY, priority=priority)


def test_beam_search_has_the_sequences_of_the_search(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    found = llm.beam_search([{"prompt": PROMPT}, "Hello"], params)
    expected = llm.generate([PROMPT, "Hello"], replace(GREEDY, n=3, use_beam_search=True, logprobs=6))
    for output, request in zip(found, expected, strict=True):
        assert len(output.sequences) == 3
        for sequence, answer in zip(output.sequences, request.outputs, strict=True):
            assert sequence.tokens == [*request.prompt_token_ids, *answer.token_ids]
            assert sequence.text == f"{request.prompt}{answer.text}"
            assert sequence.logprobs == answer.logprobs
            assert sequence.cum_logprob == pytest.approx(
                sum(entries[token].logprob for entries, token in zip(sequence.logprobs, answer.token_ids, strict=True))
            )
    assert found[0].sequences[0].orig_prompt["prompt"] == PROMPT


def test_beam_search_rejects_other_parameters(tiny: LLM) -> None:
    with pytest.raises(RequestError, match="params must be BeamSearchParams, got SamplingParams"):
        tiny.beam_search([[5]], GREEDY)  # type: ignore[arg-type]
    for given, message in (
        ({"beam_width": MAX_BEAMS + 1}, "beam_width must be between 1 and 32, got 33"),
        ({"temperature": 0.5}, "temperature=0.5 cannot be combined"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"structured_outputs": None}, "structured_outputs is not an option"),
    ):
        with pytest.raises(RequestError, match=message):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **given})
    with pytest.raises(RequestError, match="logprobs must be between 0 and 20 with use_beam_search, got -1"):
        SamplingParams(n=2, use_beam_search=True, logprobs=-1)


def test_a_reset_prefix_cache_has_no_prefix(tiny: LLM, tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    for options in ({}, {"prefix_cache_dir": tmp_path}):
        llm = LLM(str(tiny_model_dir("llama")), num_kv_blocks=20, **OPTIONS, **options)
        cached = []
        for is_reset in (False, False, True, False):
            if is_reset:
                assert llm.reset_prefix_cache() is True
            cached.append(llm.generate([*range(40)], GREEDY)[0].num_cached_tokens)
        assert cached == [0, 32, 0, 32]
        llm.close()


def test_a_context_of_what_fits(tiny_model_dir: Callable[..., Path]) -> None:
    for num_blocks, expected in ((4, 64), (100, 256)):
        llm = LLM(str(tiny_model_dir("llama")), num_kv_blocks=num_blocks, max_model_len=-1, **OPTIONS)
        assert llm.engine.facts.scheduler_config.max_model_len == expected
    with pytest.raises(ConfigError, match="max_model_len must be at least 2, got -2"):
        EngineConfig(max_model_len=-2)


def test_a_limit_that_does_not_fit_is_lowered(tiny: LLM) -> None:
    (answer,) = tiny.generate([[5] * 250], replace(GREEDY, max_tokens=5000))[0].outputs
    assert (len(answer.token_ids), answer.finish_reason) == (6, "length")


def test_the_prompt_of_a_list_that_does_not_fit_is_named(llm: LLM) -> None:
    beams, long = BeamSearchParams(beam_width=2, max_tokens=2), "x " * 9000
    chats = [[{"role": "user", "content": text}] for text in ("fine", long)]
    for run in (
        lambda: llm.generate(["fine", long], GREEDY),
        lambda: llm.chat(chats, GREEDY),
        lambda: llm.beam_search(["fine", long], beams),
    ):
        with pytest.raises(ContextLengthError, match=r"^prompt 1: .* tokens, but at most 6399 fit") as error:
            run()
        assert error.value.code == "context_length_exceeded"
        assert llm.engine.core.scheduler.is_idle


def test_a_prompt_that_fails_while_it_runs_is_named(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tiny.engine.core._executor.result

    def failing(handle: object) -> ModelRunnerOutput:
        output = result(handle)
        return replace(output, errors={[*output.token_ids][2]: "its grammar is too complex"})

    with monkeypatch.context() as patch:
        patch.setattr(tiny.engine.core._executor, "result", failing)
        with pytest.raises(RequestError, match=r"^prompt 2: its grammar is too complex"):
            tiny.generate([[5], [6], [7]], GREEDY)
    assert tiny.engine.core.scheduler.is_idle
    assert len(tiny.generate([[5], [6], [7]], GREEDY)) == 3
