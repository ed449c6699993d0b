"""Structured outputs of a random model at a high temperature, which samples every token that the mask allows."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from chairlift import LLM, AsyncLLM, EngineConfig, RequestOutput, SamplingParams, StructuredOutputs
from chairlift.engine.grammar_gate import GrammarGate
from chairlift.engine.process.commands import Abort, Add, Command, Stop
from chairlift.engine.process.core_loop import CoreLoop
from chairlift.errors import ConfigError, RequestError
from chairlift.grammar.compiler import PROBE_STEPS, CompiledGrammar, GrammarMatcher
from chairlift.outputs import EngineCoreOutput
from support.byte_tokenizer import VOCAB_SIZE, with_byte_tokenizer
from support.process_engines import started
from support.random_schemas import random_schema
from support.waiting import until

EOS = 2
NUM_SCHEMAS = 50
OPTIONS: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 24, "max_num_batched_tokens": 128, "block_size": 8}


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model_dir("llama", vocab_size=VOCAB_SIZE + 9, max_position_embeddings=1024)
    return with_byte_tokenizer(model, tmp_path_factory.mktemp("structured"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), num_kv_blocks=2000, **OPTIONS)


def hot(seed: int = 0, max_tokens: int = 600, **fields: Any) -> SamplingParams:
    constraint = {name: fields.pop(name) for name in StructuredOutputs.__slots__ if name in fields}
    structure = StructuredOutputs(**constraint)
    return SamplingParams(
        **{"temperature": 3.0, "seed": seed, "max_tokens": max_tokens, **fields}, structured_outputs=structure
    )


def answers(llm: LLM, params: Sequence[SamplingParams], prompt: str = "Hello") -> list[RequestOutput]:
    return llm.generate([f"{prompt} {index}" for index in range(len(params))], params, use_tqdm=False)


def texts(outputs: Sequence[RequestOutput]) -> list[str]:
    assert all(answer.finish_reason == "stop" for output in outputs for answer in output.outputs)
    return [answer.text for output in outputs for answer in output.outputs]


def test_every_answer_validates_against_its_random_schema(llm: LLM) -> None:
    schemas = [random_schema(seed) for seed in range(NUM_SCHEMAS)]
    outputs = answers(llm, [hot(seed, json=schema) for seed, schema in enumerate(schemas)])
    reasons = Counter(output.outputs[0].finish_reason for output in outputs)
    assert reasons["stop"] >= 0.95 * NUM_SCHEMAS
    validator = jsonschema.Draft202012Validator
    for schema, output in zip(schemas, outputs, strict=True):
        if output.outputs[0].finish_reason == "stop":
            value = json.loads(output.outputs[0].text)
            validator(schema, format_checker=validator.FORMAT_CHECKER).validate(value)


def test_regex_choice_grammar_and_json_object(llm: LLM) -> None:
    pattern = r"(\d{3}-\d{4}|[a-f]+@(x|yy)\.org)"
    assert all(re.fullmatch(pattern, text) for text in texts(answers(llm, [hot(i, regex=pattern) for i in range(20)])))
    choices = ["yes", "no", "maybe 漢", 'say "x"\n']
    assert set(texts(answers(llm, [hot(i, choice=choices) for i in range(40)]))) == set(choices)
    grammar = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/'
    assert all(eval(text) >= 0 for text in _normal(texts(answers(llm, [hot(i, grammar=grammar) for i in range(20)]))))
    outputs = answers(llm, [hot(i, json_object=True) for i in range(20)])
    whole = [o.outputs[0].text for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert whole
    assert all(isinstance(json.loads(text), dict) for text in whole)


def _normal(sums: list[str]) -> list[str]:
    """Remove leading zeros, which Python does not accept in numbers."""
    return [re.sub(r"\b0+(?=\d)", "", text) for text in sums]


def test_an_answer_ends_with_its_structure_and_eos(llm: LLM) -> None:
    (output,) = answers(llm, [hot(choice=["yes"], logprobs=2)])
    (answer,) = output.outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("yes", "stop", None)
    assert answer.logprobs is not None
    chosen = zip(answer.logprobs, answer.token_ids, strict=True)
    assert answer.cumulative_logprob == pytest.approx(sum(entries[token].logprob for entries, token in chosen))
    assert answer.cumulative_logprob < -1  # of the model's own distribution, which does not know of the structure


def test_structures_with_n_stop_strings_min_tokens_and_greedy_sampling(llm: LLM) -> None:
    params = hot(1, regex="[ab]{4,60}", n=6, min_tokens=12)
    (output,) = answers(llm, [params])
    assert len({answer.text for answer in output.outputs}) > 3
    assert all(len(answer.token_ids) >= 12 and answer.finish_reason == "stop" for answer in output.outputs)
    (stopped,) = answers(llm, [hot(1, regex="a{2,5}b{2,5}(ab){5}c", stop=["ba"])])
    assert stopped.outputs[0].stop_reason == "ba"
    assert re.fullmatch("a{2,5}b{1,4}", stopped.outputs[0].text)
    greedy = [hot(i, choice=["no", "yes"], temperature=0) for i in range(3)]
    assert set(texts(answers(llm, greedy))) <= {"no", "yes"}


def test_structures_with_penalties_bias_filters_and_prompt_logprobs(llm: LLM) -> None:
    params = [
        hot(i, regex="[0-9]{5}", top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.3, frequency_penalty=1.0)
        for i in range(8)
    ]
    params += [hot(i, regex="[0-9]{5}", logit_bias={EOS: 100.0}, prompt_logprobs=1) for i in range(8)]
    assert all(re.fullmatch("[0-9]{5}", text) for text in texts(answers(llm, params)))


def write_sentencepiece(folder: Path) -> None:
    """A tokenizer like that of Llama 2: a space is part of a token, and unknown characters are byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [f"{space}{letter}" for space in ("", "▁") for letter in 'abcdefgxyz"{}[]:,0123456789']
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(pieces[:3])
    backend.save(str(folder / "tokenizer.json"))


def test_structures_with_a_sentencepiece_tokenizer(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    write_sentencepiece(tmp_path)
    spaced = LLM(str(tmp_path), num_kv_blocks=500, **OPTIONS)
    choices = ["a b", " c", "é 漢"]
    assert set(texts(answers(spaced, [hot(i, choice=choices) for i in range(24)]))) == set(choices)
    schemas = [random_schema(seed) for seed in range(15)]
    for schema, text in zip(schemas, texts(answers(spaced, [hot(json=schema) for schema in schemas])), strict=True):
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def crowd() -> list[SamplingParams]:
    constrained = [hot(seed, 60, json=random_schema(seed)) for seed in range(12)]
    constrained += [hot(seed, 40, regex="([a-c]{3}-)*[0-9]") for seed in range(4)]
    free = [SamplingParams(temperature=1.0, seed=seed, max_tokens=50, ignore_eos=True) for seed in range(8)]
    return [params for pair in zip(constrained, [*free, *free], strict=True) for params in pair]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[tuple[str, list[int]]]:
    outputs = [llm.generate([f"Hello {i}"], p, use_tqdm=False)[0] for i, p in enumerate(crowd())]
    return [(output.outputs[0].text, output.outputs[0].token_ids) for output in outputs]


WAYS: dict[str, dict[str, Any]] = {
    "crowd": {"num_kv_blocks": 2000},
    "preempted": {"num_kv_blocks": 40, "enable_prefix_caching": False},
    "preempted with a prefix cache": {"num_kv_blocks": 40},
    "in chunks of one token": {"num_kv_blocks": 2000, "max_num_batched_tokens": 24},
    "static": {"num_kv_blocks": 2000, "batching": "static", "static_batch_size": 5},
    "exact": {"num_kv_blocks": 100, "kv": "exact"},
    "max": {"num_kv_blocks": 512, "kv": "max"},
}


@pytest.mark.parametrize("way", WAYS)
def test_structures_do_not_depend_on_the_batch(way: str, folder: Path, alone: list[tuple[str, list[int]]]) -> None:
    together = LLM(str(folder), **{**OPTIONS, **WAYS[way]})
    outputs = answers(together, crowd())
    assert [(output.outputs[0].text, output.outputs[0].token_ids) for output in outputs] == alone
    assert bool(sum(output.num_preemptions for output in outputs)) == way.startswith("preempted")


def test_policies_that_require_the_output_length_reject_structures(folder: Path) -> None:
    oracle = LLM(str(folder), num_kv_blocks=200, kv="oracle", **OPTIONS)
    with pytest.raises((RequestError, ConfigError), match="oracle"):
        answers(oracle, [hot(choice=["yes"])])


def test_invalid_structures_are_rejected_before_the_run(llm: LLM, folder: Path) -> None:
    with pytest.raises(RequestError, match=r"prompt 1: .*uniqueItems") as caught:
        answers(llm, [hot(regex="a"), hot(json={"type": "array", "uniqueItems": True})])
    assert caught.value.param == "structured_outputs.json"
    assert not llm.engine.core.has_work
    no_text = LLM(str(folder), num_kv_blocks=50, skip_tokenizer_init=True, **OPTIONS)
    with pytest.raises(RequestError, match="requires a tokenizer"):
        no_text.generate([[5, 6]], hot(regex="a"), use_tqdm=False)


def test_a_model_without_eos_does_not_support_structures(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    endless = with_byte_tokenizer(
        tiny_model_dir("llama", vocab_size=VOCAB_SIZE, eos_token_id=None), tmp_path / "endless"
    )
    (endless / "tokenizer_config.json").unlink()  # It names an EOS token, too, and so does its text.
    file = endless / "tokenizer.json"
    file.write_text(file.read_text().replace("<eos>", "<none>"))
    with pytest.raises(RequestError, match="EOS"):
        LLM(str(endless), num_kv_blocks=50, **OPTIONS).generate("a", hot(regex="a"), use_tqdm=False)


def breaking(after: int) -> Any:
    """A matcher that fails after a given number of tokens."""

    class Breaking(GrammarMatcher):
        num_seen = 0

        def advance(self, token_ids: Sequence[int]) -> None:
            super().advance(token_ids)
            self.num_seen += len(token_ids)
            if self.num_seen >= after:
                self.error = "step limit"

    return Breaking


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_a_grammar_that_fails_during_generation_ends_only_its_request(
    batching: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> list[Any]:
        llm = AsyncLLM(model=str(folder), num_kv_blocks=200, **{**OPTIONS, "batching": batching})
        free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        starts = [llm.start(None, [5, 6, i + 7], p) for i, p in enumerate([free, hot(regex="[ab]{150}"), free])]
        outcomes = await asyncio.gather(*(generation.collect() for generation in starts), return_exceptions=True)
        await until(lambda: llm.num_unfinished == 0)
        llm.close()
        return list(outcomes)

    monkeypatch.setattr(CompiledGrammar, "matcher", lambda self: breaking(PROBE_STEPS + 5)(self._start.deep_copy()))
    first, broken, last = asyncio.run(run())
    assert isinstance(broken, RequestError)
    assert "step limit" in str(broken)
    assert [len(output.outputs[0].token_ids) for output in (first, last)] == [20, 20]


class FakeCore:
    """Records which requests are added and aborted; has work while a request is unfinished."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.has_work = False

    def add(self, request: Any) -> None:
        self.calls.append(request.request_id)
        self.has_work = True

    def abort(self, request_id: str, reason: Any) -> None:
        self.calls.append(f"abort {request_id}")

    def step(self) -> list[EngineCoreOutput]:
        return []


class SlowCompiler:
    def __init__(self) -> None:
        self.outcomes: dict[StructuredOutputs, Future[CompiledGrammar]] = {}

    def submit(self, constraint: StructuredOutputs, tenant: str = "") -> Future[CompiledGrammar]:
        return self.outcomes.setdefault(constraint, Future())


def test_requests_wait_only_for_their_own_grammar(llm: LLM) -> None:
    make = llm.engine.input_processor.make

    def add(name: str, params: SamplingParams) -> Add:
        requests = make(name, [5], params, arrival_time=0)
        return Add.from_siblings([replace(r, request_id=f"{name}{i}") for i, r in enumerate(requests)])

    slow, slower = hot(regex="a+", n=2), hot(regex="b+")
    compiler, core = SlowCompiler(), FakeCore()
    script: list[Command | Callable[[], None]] = [
        add("slow", slow),
        add("slower", slower),
        add("free", SamplingParams()),
        Abort(["slow1"]),
        lambda: compiler.submit(StructuredOutputs(regex="a+")).set_result(None),  # type: ignore[arg-type]
        add("late", SamplingParams()),
        lambda: compiler.submit(StructuredOutputs(regex="b+")).set_exception(RequestError("no", "regex")),
        add("last", slower),
        Stop(),
    ]

    def take(wait: bool) -> Command | None:
        step = script.pop(0)
        if callable(step):
            step()
            return None
        return step

    delivered: list[EngineCoreOutput] = []
    CoreLoop(core, take, delivered.extend, GrammarGate(compiler)).run()  # type: ignore[arg-type]
    assert core.calls == ["free0", "abort slow1", "slow0", "late0"]
    assert [(each.request_id, each.error, each.error_param) for each in delivered] == [
        ("slower0", "no", "regex"),
        ("last0", "no", "regex"),
    ]


def test_a_grammar_whose_masks_are_too_complex_is_rejected_by_the_engine_process(folder: Path) -> None:
    names = [f"r{index}" for index in range(2100)]
    rules = [f'{name}: "{chr(97 + at % 26)}" {names[(7 * at + 1) % 2100]}?' for at, name in enumerate(names)]
    grammar = "\n".join([f"start: {' | '.join(names)}", *rules])

    async def run() -> RequestError:
        llm = AsyncLLM(client=started(EngineConfig(model=str(folder), num_kv_blocks=200, **OPTIONS)))
        llm.engine.input_processor.constraints.compile(hot(grammar=grammar))
        with pytest.raises(RequestError) as rejected:
            await llm.start(None, [5], hot(grammar=grammar)).collect()
        llm.close()
        return rejected.value

    error = asyncio.run(run())
    assert "is too complex" in str(error)
    assert error.param == "structured_outputs.grammar"
