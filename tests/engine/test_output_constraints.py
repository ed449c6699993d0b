"""Bad words, allowed tokens, truncated prompts and answers without text, through LLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chairlift import LLM, SamplingParams
from chairlift.errors import RequestError
from chairlift.outputs import CompletionOutput
from chairlift.sampling_params import MAX_BAD_WORDS
from support.byte_tokenizer import VOCAB_SIZE, with_byte_tokenizer
from support.position_logprobs import first_logprobs

EOS = 2


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = with_byte_tokenizer(tiny_model_dir("llama", vocab_size=VOCAB_SIZE), tmp_path_factory.mktemp("constraints"))
    return LLM(str(folder), num_kv_blocks=200, num_threads=1, max_num_seqs=8)


def answer(llm: LLM, prompt: Any = "Hello", **fields: Any) -> CompletionOutput:
    params = SamplingParams(**{"temperature": 2.0, "seed": 1, "max_tokens": 40, "ignore_eos": True, **fields})
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def test_answers_do_not_contain_the_tokens_of_bad_words(llm: LLM) -> None:
    tokenizer = llm.engine.tokenizer
    said = answer(llm).token_ids
    words = [tokenizer.decode([token]) for token in said if tokenizer.token_bytes(token).strip().isalpha()][:6]
    assert len(words) == 6
    without = answer(llm, bad_words=words).token_ids
    forbidden = [
        tokenizer.encode(form + word.lstrip(), add_special_tokens=False) for word in words for form in ("", " ")
    ]
    for ids in forbidden:
        assert not any(without[at : at + len(ids)] == ids for at in range(len(without)))
    assert any(ids == said[at : at + len(ids)] for ids in forbidden for at in range(len(said)))


def test_the_maximum_number_of_bad_words_is_that_of_words_and_not_of_spellings(llm: LLM) -> None:
    """Each word has a second spelling with a space before it. The engine process receives all of them."""
    words = [f"{first}{second}" for first in "abcdefghijklmnop" for second in "ABCDEFGHIJKLMNOP"]
    assert len(words) == MAX_BAD_WORDS
    assert len(answer(llm, bad_words=words).token_ids) == 40
    resolved = llm.engine.input_processor.constraints.resolve(SamplingParams(bad_words=words), ())
    assert len(resolved.bad_words) == 2 * MAX_BAD_WORDS
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(resolved), type=SamplingParams) == resolved
    for too_many in ([*words, "x"], [[1]] * (2 * MAX_BAD_WORDS + 1)):
        with pytest.raises(RequestError, match=r"bad_words must have at most (256 words|512 token sequences), got"):
            SamplingParams(bad_words=too_many)


def test_bad_words_may_be_token_ids(llm: LLM) -> None:
    pair = answer(llm, temperature=0).token_ids[3:5]
    without = answer(llm, temperature=0, bad_words=[pair]).token_ids
    assert pair not in [without[at : at + 2] for at in range(len(without))]
    assert without[:4] == answer(llm, temperature=0).token_ids[:4]
    ending: dict[str, Any] = {"logit_bias": {EOS: 100.0}, "ignore_eos": False}
    assert answer(llm, **ending).token_ids == [EOS]
    assert EOS not in answer(llm, **ending, bad_words=[[EOS]]).token_ids


def test_only_allowed_tokens_are_sampled_and_eos_only_if_allowed(llm: LLM) -> None:
    assert set(answer(llm, allowed_token_ids=[50, 51, 52]).token_ids) == {50, 51, 52}
    ended = answer(llm, allowed_token_ids=[50, EOS], ignore_eos=False, min_tokens=3)
    assert (ended.finish_reason, ended.token_ids[-1], set(ended.token_ids[:-1])) == ("stop", EOS, {50})
    assert len(ended.token_ids) > 3


REJECTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "token": ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids", "outside"),
    "word": ({"bad_words": [[5, VOCAB_SIZE]]}, "bad_words", "outside"),
    "nothing left": ({"allowed_token_ids": [50], "bad_words": [[50, 50]]}, "allowed_token_ids", "no token is left"),
    "no end": (
        {"allowed_token_ids": [EOS], "ignore_eos": False, "min_tokens": 2}, "allowed_token_ids", "no token is left"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_constraints_that_mask_every_token_are_rejected(name: str, llm: LLM) -> None:
    fields, param, reason = REJECTED[name]
    with pytest.raises(RequestError, match=reason) as caught:
        answer(llm, **fields)
    assert caught.value.param == param


def test_bad_words_as_text_require_a_tokenizer(llm: LLM, tiny_model_dir: Callable[..., Path]) -> None:
    folder = tiny_model_dir("llama", vocab_size=VOCAB_SIZE)
    no_text = LLM(str(folder), num_kv_blocks=50, skip_tokenizer_init=True, num_threads=1, max_num_seqs=2)
    with pytest.raises(RequestError, match="lists of token ids"):
        answer(no_text, [5, 6], bad_words=["a"])
    assert len(answer(no_text, [5, 6], bad_words=[[7]]).token_ids) == 40


@pytest.mark.parametrize(("kept", "max_tokens", "expected"), [(3, 10, 3), (400, 10, 200), (-1, 100, 156), (-1, 255, 1)])
def test_a_prompt_is_truncated_from_its_beginning(llm: LLM, kept: int, max_tokens: int, expected: int) -> None:
    ids = [10 + at % 300 for at in range(200)]
    params = SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=kept, temperature=0)
    (output,) = llm.generate(ids, params, use_tqdm=False)
    assert output.prompt_token_ids == ids[-expected:]


def test_a_text_is_truncated_unless_it_is_far_too_long(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, truncate_prompt_tokens=20)
    (output,) = llm.generate("the quick fox " * 300, params, use_tqdm=False)
    assert len(output.prompt_token_ids) == 20
    for rejected in ("the quick fox " * 30_000, "the quick fox " * 300):
        with pytest.raises(RequestError, match="Shorten it"):
            llm.generate(rejected, SamplingParams() if len(rejected) < 10_000 else params, use_tqdm=False)


def test_an_answer_without_text_has_the_same_tokens(llm: LLM) -> None:
    silent = answer(llm, detokenize=False, logprobs=0)
    assert silent.text == ""
    assert silent.token_ids == answer(llm).token_ids
    assert silent.logprobs is not None
    assert silent.cumulative_logprob == pytest.approx(sum(first_logprobs(silent.logprobs)))
    assert answer(llm).cumulative_logprob is None
