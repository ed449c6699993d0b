"""Long texts: what is kept equals the tokens of the whole text, and the rest is not tokenized."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chairlift.engine.input_processor import InputProcessor
from chairlift.engine.pooled_prompts import PooledOptions
from chairlift.engine.request_limits import RequestLimits
from chairlift.errors import ContextLengthError
from chairlift.loading.model_source import GGUFSource
from chairlift.loading.text import tokenizer as tokenizer_module
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.models.pooling import PoolingConfig
from chairlift.sampling_params import SamplingParams

TEXT = "Some words of a long text, which it's nobody's duty to read: 12,345 times.\n" * 8_000
CONTEXT = 512


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    return GGUFSource(smollm2_gguf, "smollm2").tokenizer()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that the library encodes."""
    found: list[str] = []
    encode = tokenizer_module.encode_text

    def recorded(backend: Any, text: str, **options: Any) -> Any:
        found.append(text)
        return encode(backend, text, **options)

    monkeypatch.setattr(tokenizer_module, "encode_text", recorded)
    return found


def processor(tokenizer: Tokenizer, *, is_pooling: bool = False) -> InputProcessor:
    config: Any = SimpleNamespace(vocab_size=tokenizer.vocab_size, eos_token_ids=(2,), encoder=None)
    limits, pooling = RequestLimits(CONTEXT, 10_000, is_pooling=is_pooling), PoolingConfig("embed", 8)
    return InputProcessor(config, tokenizer, limits, pooling=pooling if is_pooling else None)


def test_the_end_of_a_prompt_is_kept(tokenizer: Tokenizer, encoded: list[str]) -> None:
    expected = tokenizer.encode(TEXT)
    encoded.clear()
    for kept, num_tokens in ((200, 200), (-1, CONTEXT - 10)):
        params = SamplingParams(max_tokens=10, truncate_prompt_tokens=kept)
        text, token_ids = processor(tokenizer).encode(TEXT, params)
        assert (text, token_ids) == (TEXT, expected[-num_tokens:])
    assert sum(map(len, encoded)) < 40_000


def test_the_beginning_of_a_pooled_text_is_kept(tokenizer: Tokenizer, encoded: list[str]) -> None:
    expected = tokenizer.encode(TEXT)
    encoded.clear()
    pooled = processor(tokenizer, is_pooling=True)
    assert pooled.encode_pooled(TEXT, None, PooledOptions(300)) == expected[:300]
    assert pooled.encode_pooled(TEXT, None, PooledOptions(-1)) == expected[:CONTEXT]
    assert tokenizer.encode(tokenizer.first_tokens(TEXT, 100)) == expected[:100]
    assert sum(map(len, encoded)) < 40_000


@pytest.mark.parametrize("kept", [None, 10**9])
def test_a_text_is_rejected_when_enough_of_it_is_tokenized(
    tokenizer: Tokenizer, encoded: list[str], kept: int | None
) -> None:
    text = TEXT[:40_000]  # It could be short enough if all tokens were the longest one.
    assert len(text) < CONTEXT * tokenizer.max_token_bytes
    with pytest.raises(ContextLengthError, match=r"prompt has at least [0-9]+ tokens, but at most 511 fit") as caught:
        processor(tokenizer).encode(text, SamplingParams(truncate_prompt_tokens=kept))
    assert CONTEXT <= caught.value.num_tokens < len(tokenizer.encode(text))
    assert len(encoded[0]) < 20_000
