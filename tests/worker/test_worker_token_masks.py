from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_fakes import SamplerBench, new_request

from chairlift import SamplingParams, StructuredOutputs
from chairlift.grammar.compiler import GrammarCompiler, num_words
from chairlift.kernels.sampling import SamplingKernels
from chairlift.loading.text.hf_tokenizer import folder_tokenizer
from chairlift.structured_outputs import Reasoning
from chairlift.worker.request_rows import RequestRows
from chairlift.worker.sampling_state import BadWords
from chairlift.worker.token_masks import TokenMasks, bit_mask
from support.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from support.case_loop import loop_over

EOS = 2
VOCAB = 40
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    tokenizer = folder_tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    return GrammarCompiler(lambda: tokenizer, VOCAB_SIZE, [EOS])


@given(st.integers(1, 130), st.integers(1, 5), st.randoms())
@settings(max_examples=60, deadline=None)
def test_exactly_the_logits_of_zero_bits_are_masked(
    sampling: SamplingKernels, vocab_size: int, num_rows: int, rng: random.Random
) -> None:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(rng.randrange(1000)))
    index = np.array(sorted(rng.sample(range(num_rows), rng.randint(1, num_rows))), dtype=np.int64)
    left = [sorted(rng.sample(range(vocab_size), rng.choice([0, vocab_size, vocab_size // 2]))) for _ in index]
    masks = np.stack([bit_mask(np.array(ids, dtype=np.int64), vocab_size) for ids in left])
    assert masks.shape == (len(index), num_words(vocab_size))
    expected = logits.clone()
    for row, ids in zip(index.tolist(), left, strict=True):
        expected[row] = -torch.inf
        expected[row, ids] = logits[row, ids]
    sampling.mask(logits, index, masks)
    assert torch.equal(logits, expected)


def test_only_allowed_tokens_are_sampled_and_other_rows_are_unchanged(sampling: SamplingKernels) -> None:
    params = [SamplingParams(allowed_token_ids=[7, 31, 32, 39], temperature=5.0), SamplingParams(temperature=5.0)] * 20
    requests = [new_request(str(i), [3, 4], p, seed=i) for i, p in enumerate(params)]
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)).repeat(len(requests), 1)
    bench = SamplerBench(requests, VOCAB, sampling)
    drawn = bench.sample(logits, [request.request_id for request in requests])
    assert set(drawn[::2]) == {7, 31, 32, 39}
    free = [new_request(str(i), [3, 4], params[1], seed=i) for i in range(1, len(params), 2)]
    assert drawn[1::2] == SamplerBench(free, VOCAB, sampling).sample(logits[::2], [r.request_id for r in free])


WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=5)


@given(WORDS, st.lists(st.integers(0, 3), max_size=8))
@settings(max_examples=200, deadline=None)
def test_completing_tokens_are_those_that_complete_a_word(words: list[list[int]], answer: list[int]) -> None:
    bad = BadWords(words)
    found = bad.completing_tokens(answer[len(answer) - min(bad.max_before, len(answer)) :])
    assert set(found.tolist()) == {
        token for token in range(4) if any([*answer, token][-len(word) :] == word for word in words)
    }


def test_bad_words_are_not_completed_but_their_tokens_are_allowed(sampling: SamplingKernels) -> None:
    """Words in the prompt are ignored: a bad word is completed by output tokens only."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 9], logits[0, 8] = 5.0, 4.0
    words = SamplingParams(temperature=0, bad_words=[[1, 2, 9], [9, 9], [30]])
    for prompt, answer, expected in (([1, 2], [], 9), ([5], [1, 2], 8), ([5], [2, 1], 9), ([5], [4, 9], 8)):
        request = new_request("a", [*prompt, *answer], words, num_prompt=len(prompt))
        plain = new_request("b", [*prompt, *answer], GREEDY, num_prompt=len(prompt))
        bench = SamplerBench([plain, request], VOCAB, sampling)
        assert bench.sample(logits.repeat(2, 1), ["b", "a"]) == [9, expected]


class Answers:
    """Rows with grammars whose tokens are sampled from the masks."""

    def __init__(self, grammars: GrammarCompiler, num_rows: int = 4) -> None:
        self.rows = RequestRows(num_rows, 256, 16, torch.device("cpu"))
        self.masks = TokenMasks(self.rows, VOCAB_SIZE, grammars)

    def add(self, request_id: str, tokens: Sequence[int], params: SamplingParams, num_prompt: int) -> int:
        request = new_request(request_id, tokens, params, num_prompt=num_prompt, stop=[EOS])
        row = self.rows.add(request)
        self.masks.add(row, request)
        return row

    def remove(self, request_id: str) -> None:
        self.masks.remove(self.rows.remove(request_id))

    def allowed(self, *rows: int) -> list[list[int]]:
        bits = self.masks.fill(np.array(rows))
        return [np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little")).tolist() for line in bits]

    def append(self, row: int, token: int) -> None:
        self.rows.append_sampled(np.array([row]), torch.tensor([token]))


def structured(min_tokens: int = 0, **fields: object) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputs(**fields), min_tokens=min_tokens, max_tokens=200)  # type: ignore[arg-type]


def test_a_preempted_request_resumes_in_its_grammar(grammars: GrammarCompiler) -> None:
    rng = random.Random(5)
    answers = Answers(grammars)
    prompt, tokens = [9, 10, 11], [9, 10, 11]
    params = structured(json={"type": "array", "items": {"enum": ["ab", "c", 12]}, "minItems": 3, "maxItems": 9})
    row = answers.add("a", tokens, params, len(prompt))
    other = answers.add("other", [5], structured(choice=["yes", "no"]), 1)
    while True:
        (allowed, _) = answers.allowed(row, other)
        tokens.append(rng.choice(allowed))
        if tokens[-1] == EOS:
            break
        answers.append(row, tokens[-1])
        if len(tokens) % 3 == 0:
            answers.remove("a")
            row = answers.add("a", tokens, params, len(prompt))
    assert len(tokens) > 8
    assert answers.masks.error(row) is None


def test_min_tokens_masks_eos_unless_no_other_token_is_allowed(grammars: GrammarCompiler) -> None:
    answers = Answers(grammars)
    row = answers.add("a", [9], structured(5, regex="a*"), 1)
    ((first,), _) = [sorted(set(ids) - {EOS})[:1] for ids in answers.allowed(row) * 2]
    assert EOS not in answers.allowed(row)[0]
    for _ in range(5):
        answers.append(row, first)
    assert EOS in answers.allowed(row)[0]
    short = answers.add("b", [9], structured(5, choice=["a"]), 1)
    (token,) = answers.allowed(short)[0]
    answers.append(short, token)
    assert answers.allowed(short) == [[EOS]]


def test_a_grammar_that_fails_reports_an_error_and_allows_eos(grammars: GrammarCompiler) -> None:
    answers = Answers(grammars)
    good = answers.add("a", [9], structured(choice=["yes"]), 1)
    bad = answers.add("b", [9], structured(choice=["yes"]), 1)
    answers.append(bad, 300)
    allowed = answers.allowed(good, bad)
    assert allowed[1] == [EOS]
    assert answers.masks.error(good) is None
    assert "doesn't satisfy the grammar" in str(answers.masks.error(bad))
    wrong = answers.add("c", [9], structured(regex="a("), 1)
    assert answers.allowed(wrong) == [[EOS]]
    assert "unclosed group" in str(answers.masks.error(wrong))


def test_the_masks_of_removed_requests_are_deleted(grammars: GrammarCompiler) -> None:
    answers = Answers(grammars, num_rows=1)
    answers.add("a", [9], structured(choice=["yes"]), 1)
    answers.remove("a")
    row = answers.add("b", [9], SamplingParams(allowed_token_ids=[5, 6]), 1)
    assert answers.allowed(row) == [[5, 6]]


def test_the_byte_tokenizer_has_the_tokens_that_the_masks_require(tmp_path: Path) -> None:
    tokenizer = folder_tokenizer(write_byte_tokenizer(tmp_path))
    assert tokenizer.vocab_size <= VOCAB_SIZE
    assert tokenizer.token_to_id("<eos>") == EOS
    assert tokenizer.special_token_ids == {0, 1, 2, 3}


@loop_over(
    ("text", "form"),
    [
        ("<think>a</think>\n", Reasoning("<think>", "</think>")),
        ("a</think>", Reasoning("<think>", "</think>", is_inside=True)),
        ("<think>ä</dächt>\n<ä>", Reasoning("<think>", "</dächt>", answer="<ä>")),
        ("\n", Reasoning("<think>", "</think>")),
        ("<|tool|>a<|tool|>", Reasoning("<|tool|>", "a<|tool|>")),
    ],
)
def test_min_tokens_counts_after_the_reasoning(grammars: GrammarCompiler, text: str, form: Reasoning) -> None:
    tokenizer = grammars._get_tokenizer()
    reasoning = tokenizer.encode(text, add_special_tokens=False)
    letter = tokenizer.encode("b", add_special_tokens=False)
    constraints: list[dict[str, Any]] = [{}, {"allowed_token_ids": [EOS, *letter]}]
    constraints.append({"structured_outputs": StructuredOutputs(calls="start: <[*]>*")})
    for fields in constraints:
        answers = Answers(grammars, 1)
        params = SamplingParams(min_tokens=2, max_tokens=200, reasoning=form, **fields)
        tokens = [9]
        row = answers.add("a", tokens, params, 1)
        for position, token in enumerate([*reasoning, *letter, *letter]):
            (allowed,) = answers.allowed(row)
            assert EOS not in allowed
            assert letter[0] in allowed
            tokens.append(token)
            answers.append(row, token)
            if position == 3:  # A preempted request counts again.
                answers.remove("a")
                row = answers.add("a", tokens, params, 1)
        assert EOS in answers.allowed(row)[0]
