"""Random texts that a grammar allows, without a model."""

from __future__ import annotations

import random

import numpy as np

from chairlift.grammar.compiler import CompiledGrammar, num_words
from chairlift.loading.text.tokenizer import Tokenizer

NUM_FREE_TOKENS = 60
"""After this many tokens the sampler prefers tokens that end strings, lists and objects."""


def sample_text(
    grammar: CompiledGrammar, tokenizer: Tokenizer, eos: int, rng: random.Random, max_tokens: int = 600
) -> str | None:
    """A random text of the grammar; None if it has not ended after `max_tokens`."""
    closing = {tokenizer.backend.token_to_id(text) for text in '"}]'}
    matcher = grammar.matcher()
    bits = np.zeros(num_words(tokenizer.vocab_size + 64), np.uint32)
    written = b""
    for step in range(max_tokens):
        matcher.fill(bits)
        assert matcher.error is None, matcher.error
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        ends = [token for token in allowed if token == eos] or [token for token in allowed if token in closing]
        token = rng.choice(ends if ends and (step > NUM_FREE_TOKENS or rng.random() < 0.3) else allowed)
        if token == eos:
            return written.decode()
        written += tokenizer.token_bytes(token)
        matcher.advance([token])
    return None
