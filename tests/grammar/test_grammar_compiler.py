from __future__ import annotations

import asyncio
import json
import math
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import llguidance
import numpy as np
import pytest

from chairlift.errors import OverloadedError, RequestError
from chairlift.grammar import checker as grammar_checker
from chairlift.grammar import compiler as grammar_compiler
from chairlift.grammar.checker import GrammarChecker
from chairlift.grammar.compiler import (
    LIMITS,
    MAX_CACHED,
    MAX_MASK_SECONDS,
    QUICK_SECONDS,
    Bits,
    CompiledGrammar,
    GrammarCompiler,
    GrammarMatcher,
    num_words,
)
from chairlift.grammar.grammar_text import JSON_OPTIONS
from chairlift.grammar.vocabulary import GrammarVocabulary
from chairlift.loading.text.hf_tokenizer import folder_tokenizer
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.structured_outputs import StructuredOutputs
from support.byte_tokenizer import SPECIAL, write_byte_tokenizer
from support.waiting import AMPLE_SECONDS, until

VOCAB_SIZE = 450
EOS = 2
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def json_rule(schema: dict[str, Any]) -> str:
    """A schema as a rule of a Lark grammar, with the options of JSON schemas in requests."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


@pytest.fixture(autouse=True)
def ample_queue_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time in the queue includes the start of the checking process, which is slow on a busy machine."""
    monkeypatch.setattr(grammar_compiler, "QUEUE_SECONDS", AMPLE_SECONDS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return folder_tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS], AMPLE_SECONDS)


def allowed(matcher: GrammarMatcher) -> list[int]:
    bits = np.zeros(num_words(VOCAB_SIZE), np.uint32)
    matcher.fill(bits)
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, constraint: StructuredOutputs, text: str) -> bool:
    """Whether some tokenization of the text is allowed up to an EOS. For forced text only one tokenization is."""
    grammar = compiler.compile(constraint)
    paths: list[tuple[bytes, list[int]]] = [(text.encode(), [])]
    while paths:
        rest, path = paths.pop()
        matcher = grammar.matcher()
        matcher.advance(path)
        for token in allowed(matcher):
            spelled = tokenizer.token_bytes(token)
            if token == EOS and not rest:
                return True
            if token != EOS and rest.startswith(spelled):
                paths.append((rest[len(spelled) :], [*path, token]))
    return False


SPELLED: dict[str, tuple[dict[str, Any], Sequence[str], Sequence[str]]] = {
    "json": ({"json": PERSON}, ['{"name":"Ada","age":3}', '{"name": "Ada", "age": 3}'],
        ['{"name":"Ada"}', '{"age":3,"name":"Ada"}', '{"name" :"Ada","age":3}', '{"name":"Adaaa","age":3}', "{}"]),
    "compact": ({"json": PERSON, "disable_any_whitespace": True}, ['{"name":"Ada","age":3}'],
        ['{"name": "Ada","age":3}']),
    "white space": ({"json": PERSON, "whitespace_pattern": r"[ \n]{0,2}"}, ['{\n "name" : "Ada" ,  "age":3}'],
        ['{   "name":"Ada","age":3}']),
    "json_object": ({"json_object": True}, ["{}", '{"a": [1, null]}'], ["[]", "1", '{"a"}']),
    "regex": ({"regex": r"(\d{2}|x)/\w+\s?"}, ["12/ab_", "x/9 "], ["12/", "x/é", "٣٣/a", "xx/a"]),
    "choice": ({"choice": ["yes", "no", 'say "é"\n', "yes, but"]}, ["yes", "yes, but", 'say "é"\n'], ["y", "maybe"]),
    "lark": ({"grammar": 'start: NAME ("," NAME)*\nNAME: /[a-z]+/'}, ["a", "ab,c"], ["a,", ",", "A"]),
    "gbnf": ({"grammar": 'root ::= "a"+ item\nitem ::= "b" | "c"'}, ["ab", "aaac"], ["b", "a"]),
    "counts with a fraction": ({"json": {"type": "array", "items": {"type": "string", "maxLength": 2.0},
        "minItems": 1.0, "maxItems": 2e0}}, ['["ab"]', '["a","b"]'], ["[]", '["abc"]', '["","",""]']),
    "unknown dialect": ({"json": {"$schema": "https://example.org/x", "const": 1}}, ["1"], ["2"]),
    "recursive reference": ({"json": {"properties": {"a": {"$ref": "#"}}, "additionalProperties": False,
        "type": "object"}}, ['{"a":{"a":{}}}'], ['{"a":1}']),
    "json in lark": ({"grammar": f'start: "<" body ">"\nbody: {json_rule(PERSON)}'}, ['<{"name":"A","age":1}>'],
        ["<{}>"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLED)
def test_grammar_accepts_valid_texts_only(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    fields, good, bad = SPELLED[name]
    constraint = StructuredOutputs(**fields)
    assert [text for text in good if not accepts(compiler, tokenizer, constraint, text)] == []
    assert [text for text in bad if accepts(compiler, tokenizer, constraint, text)] == []


def test_vocabulary_tokenizes_text_unchanged(tokenizer: Tokenizer) -> None:
    vocabulary = GrammarVocabulary(tokenizer, VOCAB_SIZE, EOS)
    for text in ('{"name": "Ada"}', "漢é ", 'a "<eos>" that is text', " <|tool|>", "\x02"):
        token_ids = vocabulary(text)
        assert b"".join(vocabulary.tokens[token] for token in token_ids) == text.encode()
        assert not tokenizer.special_token_ids.intersection(token_ids)
    assert vocabulary('{"name": "Ada"}') == tokenizer.encode('{"name": "Ada"}', add_special_tokens=False)


def test_spelling_of_special_token_is_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    assert accepts(compiler, tokenizer, StructuredOutputs(choice=["a<eos>b"]), "a<eos>b")
    assert accepts(compiler, tokenizer, StructuredOutputs(json={"const": "<|tool|>"}), '"<|tool|>"')


def test_eos_is_allowed_where_grammar_may_end_and_alone_where_it_must(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(StructuredOutputs(choice=["a", "ab"])).matcher()
    (a,) = allowed(matcher)
    matcher.advance([a])
    (b,) = set(allowed(matcher)) - {EOS}
    assert EOS in allowed(matcher)
    matcher.advance([b])
    assert allowed(matcher) == [EOS]
    matcher.advance([EOS, a, EOS])
    assert (allowed(matcher), matcher.error) == ([EOS], None)


def test_special_and_empty_tokens_do_not_match_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    first = set(allowed(compiler.compile(StructuredOutputs(regex=r"(.|\n)*")).matcher()))
    assert first - {EOS} == set(range(len(SPECIAL), tokenizer.vocab_size)) & first
    assert len(first) > 200
    named = compiler.compile(StructuredOutputs(grammar="start: <|tool|> /[a-z]/")).matcher()
    assert allowed(named) == [SPECIAL.index("<|tool|>")]


REJECTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "keyword": ({"json": {"type": "array", "uniqueItems": True}}, "json", "uniqueItems"),
    "format": ({"json": {"type": "string", "format": "color"}}, "json", "color"),
    "keyword made lenient": (
        {"json": {"not": {"type": "string"}, "x-guidance": {"lenient": True}}}, "json", "not"
    ),
    "the same in lark": (
        {"grammar": 'start: %json {"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}}'},
        "grammar",
        "uniqueItems",
    ),
    "reference to itself": ({"json": {"$ref": "#"}}, "json", r"\$ref '#' leads only to itself"),
    "references in a circle": (
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#"}}}},
        "json",
        "leads only to itself",
    ),
    "remote reference": ({"json": {"$ref": "http://example.org/schema"}}, "json", "not present"),
    "nothing satisfies it": ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "json", "nsatisfiable"),
    "oneOf of overlapping types": ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "json", "oneOf"),
    "regex": ({"regex": "a("}, "regex", "unclosed group"),
    "look-around": ({"regex": "a(?=b)"}, "regex", "look-around"),
    "lark": ({"grammar": "start: foo"}, "grammar", "foo"),
    "gbnf": ({"grammar": 'root ::= ("a"'}, "grammar", "GBNF"),
    "temperature of a rule": ({"grammar": 'start: x\nx[temperature=0.5]: "a"'}, "grammar", "temperature"),
    "white space": ({"json_object": True, "whitespace_pattern": "[ "}, "json_object", "unclosed"),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_unsupported_constraint_error_names_the_field(name: str, compiler: GrammarCompiler) -> None:
    fields, kind, reason = REJECTED[name]
    for _ in range(2):  # the second time from the cache
        with pytest.raises(RequestError, match=reason) as caught:
            compiler.compile(StructuredOutputs(**fields))
        assert caught.value.param == f"structured_outputs.{kind}"


def test_error_without_a_text_rejects_the_grammar(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class FailedMatcher:
        grammar_from_lark = staticmethod(llguidance.LLMatcher.grammar_from_lark)

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return ""

    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS])
    compiler.has_checker = False
    monkeypatch.setattr(llguidance, "LLMatcher", FailedMatcher)
    with pytest.raises(RequestError, match=r"structured_outputs.choice cannot be compiled"):
        compiler.compile(StructuredOutputs(choice=["yes"]))


def test_slow_grammar_is_rejected_and_the_next_one_compiles(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS], compile_seconds=0.4)
    patterns = [{"type": "string", "pattern": f".*{index}.*"} for index in range(400)]
    with pytest.raises(RequestError, match=r"takes longer than 0\.4 s, or more than 1024 MiB, to compile"):
        compiler.compile(StructuredOutputs(json={"allOf": patterns}))
    compiler.compile_seconds = AMPLE_SECONDS
    assert compiler.compile(StructuredOutputs(json={"allOf": patterns[:2]}))


def test_a_grammar_that_ends_the_checking_process_is_rejected_with_its_end(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end by a signal is not reported as a lack of time, and its number is named. A relaxable schema is relaxed."""

    def exchange(checker: GrammarChecker, *frames: bytes, seconds: float) -> bytes:
        if b"deadly" in frames[-1]:
            checker.send_signal(signal.SIGABRT)
            checker.wait(seconds)
        return real(checker, *frames, seconds=seconds)

    real = GrammarChecker.exchange
    monkeypatch.setattr(GrammarChecker, "exchange", exchange)
    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS], AMPLE_SECONDS)
    with pytest.raises(
        RequestError, match="ends the process that compiles it, with SIGABRT: it needs more than 1024 MiB"
    ):
        compiler.compile(StructuredOutputs(choice=["deadly"]))
    assert compiler.compile(StructuredOutputs(choice=["harmless"]))
    calls = 'start: f\n// relaxable f\nf: %json {"const": "deadly"}'
    assert compiler.compile(StructuredOutputs(calls=calls)).ignored == ("tools.f.parameters",)


def test_the_time_of_other_programs_does_not_make_a_grammar_slow() -> None:
    """The limit is processor time: a process that is suspended uses none of it."""
    checker = GrammarChecker(LIMITS)
    checker.start_if_needed()
    checker.send_signal(signal.SIGSTOP)
    waking = threading.Timer(1.0, checker.send_signal, [signal.SIGCONT])
    waking.start()
    assert checker.seconds_to_compile(json_rule({}), 0.5) < 0.5
    checker.close()


def test_checker_restarts_its_process() -> None:
    checker = GrammarChecker(LIMITS)
    assert checker.seconds_to_compile(json_rule({}), AMPLE_SECONDS) < AMPLE_SECONDS
    process = checker._process
    assert process is not None
    process.kill()
    process.wait()
    assert checker.seconds_to_compile("no grammar", AMPLE_SECONDS) < AMPLE_SECONDS
    assert checker._process is not process
    checker.close()
    assert checker._process is None


def test_checker_ignores_the_signals_that_all_processes_of_a_server_receive() -> None:
    checker = GrammarChecker(LIMITS)
    checker.start_if_needed()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        checker.send_signal(number)
        pid = checker.pid
        assert checker.seconds_to_compile(json_rule({}), AMPLE_SECONDS) < AMPLE_SECONDS
        assert checker.pid == pid
    checker.close()


def test_grammar_too_complex_at_its_first_tokens_is_rejected(compiler: GrammarCompiler) -> None:
    names = {f"p{index}": {"enum": ["x", "y"]} for index in range(2500)}
    with pytest.raises(RequestError, match=r"too complex.*step_max_items"):
        compiler.compile(StructuredOutputs(json={"properties": names}))


def test_the_time_of_other_programs_does_not_make_a_grammar_too_complex(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = GrammarMatcher.fill

    def interrupted(matcher: GrammarMatcher, bits: Bits) -> None:
        fill(matcher, bits)
        time.sleep(2 * MAX_MASK_SECONDS)

    monkeypatch.setattr(GrammarMatcher, "fill", interrupted)
    compiler.compile(StructuredOutputs(choice=["a word", "another word"]))


def test_grammar_is_compiled_once_for_all_threads(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS], AMPLE_SECONDS)
    constraint = StructuredOutputs(json=PERSON)
    grammars: list[Any] = []
    threads = [threading.Thread(target=lambda: grammars.append(compiler.compile(constraint))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(grammars) == 8
    assert len({id(grammar) for grammar in grammars}) == 1
    assert compiler.compile(StructuredOutputs(json=dict(PERSON))) is grammars[0]
    for index in range(MAX_CACHED):
        compiler.compile(StructuredOutputs(choice=[str(index)]))
    assert compiler.compile(StructuredOutputs(json=PERSON)) is not grammars[0]


def test_submit_does_not_block_while_a_grammar_is_compiled(tokenizer: Tokenizer) -> None:
    held = threading.Event()

    def slow_tokenizer() -> Tokenizer:
        assert held.wait(AMPLE_SECONDS)
        return tokenizer

    compiler = GrammarCompiler(slow_tokenizer, VOCAB_SIZE, [EOS], AMPLE_SECONDS)
    grammar = compiler.submit(StructuredOutputs(regex="a"))
    again = compiler.submit(StructuredOutputs(regex="a"))
    assert grammar is again
    assert not grammar.done()
    held.set()
    assert allowed(grammar.result(AMPLE_SECONDS).matcher()) != []


def test_matchers_of_one_grammar_are_independent(compiler: GrammarCompiler) -> None:
    rng = random.Random(3)
    grammar = compiler.compile(StructuredOutputs(json=PERSON))
    together = [grammar.matcher() for _ in range(5)]
    paths: list[list[int]] = [[] for _ in together]
    for _ in range(60):
        index = rng.randrange(len(together))
        token = rng.choice(allowed(together[index]))
        together[index].advance([token])
        paths[index].append(token)
    for matcher, path in zip(together, paths, strict=True):
        alone = grammar.matcher()
        alone.advance(path)
        assert allowed(alone) == allowed(matcher)


def test_disallowed_token_is_an_error_and_allows_only_eos(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(StructuredOutputs(choice=["yes"])).matcher()
    matcher.advance([300])
    assert matcher.error is not None
    assert allowed(matcher) == [EOS]


class HeldChecks:
    """Checks of grammars: one with "slow" in its text takes longer than QUICK_SECONDS, and waits for its release."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        self.started: list[str] = []
        self.max_running: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        checks = self

        def seconds_to_compile(checker: GrammarChecker, text: str, limit: float) -> float:
            return checks._check(text, limit)

        monkeypatch.setattr(GrammarChecker, "start_if_needed", lambda _checker: None)
        monkeypatch.setattr(GrammarChecker, "seconds_to_compile", seconds_to_compile)

    def _check(self, text: str, limit: float) -> float:
        (name,) = re.findall("(?:slow|simple)_[a-z]_[0-9]+", text)
        is_slow, tenant = name.startswith("slow"), name.split("_")[1]
        if is_slow and limit <= QUICK_SECONDS:
            return math.inf
        self._running[tenant] += 1
        self.max_running[tenant] = max(self.max_running[tenant], self._running[tenant])
        self.started.append(name)
        if is_slow:
            assert self.release.wait(AMPLE_SECONDS)
        self._running[tenant] -= 1
        return 1.0 if is_slow else 0.001


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldChecks]:
    checks = HeldChecks(monkeypatch)
    yield checks
    checks.release.set()


def named(name: str) -> StructuredOutputs:
    return StructuredOutputs(choice=[name])


def start(compiler: GrammarCompiler, name: str) -> asyncio.Future[CompiledGrammar]:
    """Compile a constraint `slow_TENANT_NUMBER` or `simple_TENANT_NUMBER` for this tenant."""
    return asyncio.ensure_future(compiler.compile_in_background(named(name), name.split("_")[1]))


async def test_simple_grammars_do_not_wait_for_slow_ones(tokenizer: Tokenizer, held: HeldChecks) -> None:
    """Neither those of another tenant, nor those of the same one, as without keys."""

    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS])
    slow = [start(compiler, f"slow_a_{index}") for index in range(10)]
    await until(lambda: len(held.started) == 1)
    for tenant in "ab":
        await asyncio.gather(*(start(compiler, f"simple_{tenant}_{index}") for index in range(10)))
    assert not any(call.done() for call in slow)
    assert len(held.started) == 21
    held.release.set()
    await asyncio.gather(*slow)
    assert held.max_running["b"] == 1
    assert len(held.started) == 30


async def test_slow_grammars_of_tenants_take_turns(tokenizer: Tokenizer, held: HeldChecks) -> None:
    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS])
    calls = [start(compiler, f"slow_a_{index}") for index in range(4)]
    await until(lambda: len(held.started) == 1 and len(compiler._slow_thread._waiting.get("a", ())) == 3)
    calls.append(start(compiler, "slow_b_0"))
    await until(lambda: len(compiler._slow_thread._waiting) == 2)
    held.release.set()
    await asyncio.gather(*calls)
    assert "slow_b_0" in held.started[:3]
    assert held.max_running == Counter("ab")


async def test_a_constraint_of_several_tenants_is_compiled_once_in_the_first_of_their_turns(
    tokenizer: Tokenizer, held: HeldChecks
) -> None:
    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS])
    slow = [start(compiler, f"slow_a_{index}") for index in range(3)]
    await until(lambda: len(held.started) == 1 and len(compiler._slow_thread._waiting.get("a", ())) == 2)
    shared = [
        asyncio.ensure_future(compiler.compile_in_background(named("slow_c_0"), tenant)) for tenant in ("a", "b", "b")
    ]
    await until(lambda: set(compiler._slow_thread._waiting) == {"a", "b"})
    held.release.set()
    grammars = await asyncio.gather(*shared)
    assert grammars[0] is grammars[1] is grammars[2]
    await asyncio.gather(*slow)
    assert held.started.count("slow_c_0") == 1
    assert held.started.index("slow_c_0") <= 2
    assert not +compiler._num_waiting


async def test_too_many_waiting_grammars_are_an_overload(
    tokenizer: Tokenizer, held: HeldChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING_PER_TENANT", 3)
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING", 5)

    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS])
    calls = [start(compiler, f"slow_{name}") for name in ("a_0", "a_1", "a_2", "a_0", "b_0", "b_1")]
    await asyncio.sleep(0)
    for name, counts in (
        ("slow_a_3", "3 constraints of this API key, and 5 in all"),
        ("slow_b_2", "2 constraints"),
    ):
        with pytest.raises(OverloadedError, match=rf"{counts}.*limits are 3 and 5") as caught:
            await start(compiler, name)
        assert (caught.value.code, caught.value.retry_after) == ("grammar_queue_full", 5.0)
    await start(compiler, "simple_c_0")  # A tenant that does not wait yet is accepted.
    calls.pop(1).cancel()
    await until(lambda: compiler._num_waiting["a"] == 2)
    calls.append(start(compiler, "slow_a_3"))
    held.release.set()
    await asyncio.gather(*calls)


async def test_a_call_that_leaves_gives_up_its_place(tokenizer: Tokenizer, held: HeldChecks) -> None:
    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS])
    first = start(compiler, "slow_a_0")
    await until(lambda: held.started == ["slow_a_0"])
    leaving, staying = start(compiler, "slow_a_1"), start(compiler, "slow_a_2")
    await until(lambda: len(compiler._slow_thread._waiting.get("a", ())) == 2)
    leaving.cancel()
    await asyncio.wait([leaving])
    assert named("slow_a_1") not in compiler._compilations
    assert len(compiler._slow_thread._waiting["a"]) == 1
    held.release.set()
    await asyncio.gather(first, staying)
    assert held.started == ["slow_a_0", "slow_a_2"]
    await start(compiler, "slow_a_1")  # It can be compiled again.


def test_waiting_too_long_is_an_overload_and_not_an_error_of_the_constraint(
    tokenizer: Tokenizer, held: HeldChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS])
    monkeypatch.setattr(grammar_compiler, "QUEUE_SECONDS", 0.01)
    with pytest.raises(OverloadedError, match=r"not compiled within 0\.01 s.*Try again later") as caught:
        asyncio.run(compiler.compile_in_background(named("slow_a_0")))
    assert caught.value.code == "grammar_queue_timeout"
    with pytest.raises(OverloadedError):
        compiler.compile(named("slow_a_0"))
    monkeypatch.setattr(grammar_compiler, "QUEUE_SECONDS", AMPLE_SECONDS)
    held.release.set()
    assert compiler.compile(named("slow_a_0"))


def test_the_grammar_of_a_constraint_in_use_is_kept(tokenizer: Tokenizer) -> None:
    """The engine looks it up between two steps, and must not compile it then."""
    compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS], AMPLE_SECONDS)
    constraint = StructuredOutputs(json=PERSON)
    grammar = compiler.compile(constraint)
    for index in range(MAX_CACHED + 1):
        compiler.compile(StructuredOutputs(choice=[str(index)]))
    assert compiler.compile(constraint) is grammar
    assert len(compiler._in_use) <= MAX_CACHED + 2


def test_a_check_that_is_killed_ends_when_no_call_waits_for_it_any_more(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = GrammarChecker.seconds_to_compile

    def never_ends(checker: GrammarChecker, text: str, limit: float) -> float:
        """Suspend the process before it receives an endless grammar, so that only a kill ends the check."""
        if "endless" in text:
            checker.start_if_needed()
            checker.send_signal(signal.SIGSTOP)
            suspended.append(text)
        return check(checker, text, limit)

    async def scenario() -> None:
        compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS], compile_seconds=600.0)
        endless = [StructuredOutputs(choice=[f"endless {name}"]) for name in "ab"]  # One for each thread.
        calls = [
            asyncio.ensure_future(compiler.compile_in_background(endless[index], str(index))) for index in (0, 1, 0)
        ]
        await asyncio.sleep(0)
        works = [compiler._compilations[constraint] for constraint in endless]
        assert [work.num_waiting for work in works] == [2, 1]
        await until(lambda: len(suspended) == 2)
        calls[0].cancel()
        calls[1].cancel()
        await until(lambda: works[1].is_abandoned and works[1].checker is None)
        assert not works[0].is_abandoned
        assert compiler.compile(StructuredOutputs(choice=["yes"]))
        calls[2].cancel()
        await until(lambda: works[0].is_abandoned and works[0].checker is None)
        assert endless[0] not in compiler._compilations

    suspended: list[str] = []
    monkeypatch.setattr(grammar_checker, "MAX_WALL_SECONDS", 600.0)
    monkeypatch.setattr(GrammarChecker, "seconds_to_compile", never_ends)
    asyncio.run(scenario())


@pytest.mark.parametrize("num_turns", range(5))
async def test_a_cancellation_that_arrives_with_the_result_is_not_lost(num_turns: int) -> None:
    result: Future[int] = Future()
    waiting = asyncio.ensure_future(grammar_compiler._wait(result, AMPLE_SECONDS))
    await asyncio.sleep(0)
    result.set_result(1)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    if waiting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await waiting


def test_the_tools_of_a_call_that_has_ended_are_not_compiled(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schemas of tools are compiled one by one if they cannot be compiled together."""
    compiled: list[str] = []

    def fails(checker: GrammarChecker, text: str, limit: float) -> float:
        compiled.append(text)
        held.wait(AMPLE_SECONDS)
        return math.inf

    async def scenario() -> None:
        compiler = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS])
        rules = [f'// relaxable f{index}\nf{index}: %json {{"type": "integer"}}' for index in range(9)]
        constraint = StructuredOutputs(calls="\n".join(["start: f0", *rules]))
        call = asyncio.ensure_future(compiler.compile_in_background(constraint))
        await until(lambda: bool(compiled))
        call.cancel()
        await asyncio.wait([call])
        held.set()
        await until(lambda: not compiler._threads._num_running[""])

    held = threading.Event()
    monkeypatch.setattr(GrammarChecker, "seconds_to_compile", fails)
    asyncio.run(scenario())
    assert len(compiled) == 1


def test_a_compiler_that_only_checks_has_the_same_outcomes_and_keeps_no_matcher_and_no_words(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    checking = GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS], AMPLE_SECONDS, is_check_only=True)
    for fields, _good, _bad in SPELLED.values():
        assert checking.compile(StructuredOutputs(**fields))._start is None
    for fields, _kind, _text in REJECTED.values():
        with pytest.raises(RequestError) as rejected:
            compiler.compile(StructuredOutputs(**fields))
        with pytest.raises(RequestError, match=f"^{re.escape(str(rejected.value))}$"):
            checking.compile(StructuredOutputs(**fields))
    named = 'start: <|tool|> "a" | <[7]>'
    assert checking.compile(StructuredOutputs(grammar=named))
    with pytest.raises(RequestError, match="unknown special token"):
        checking.compile(StructuredOutputs(grammar=named.replace("tool", "absent")))
    calls = 'start: f\n// relaxable f\nf: %json {"type": "array", "uniqueItems": true}'
    assert checking.compile(StructuredOutputs(calls=calls)).ignored == ("tools.f.parameters",)
    vocabulary = checking._llguidance_tokenizer()
    words = range(len(SPECIAL), tokenizer.vocab_size)
    assert all(vocabulary.decode_bytes([token_id]) == b"<[%d]>" % token_id for token_id in words), "it knows no text"
