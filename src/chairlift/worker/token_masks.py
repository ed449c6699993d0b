"""TokenMasks: the tokens that a constrained request may sample next, by its grammar, its list of allowed tokens, or the
minimum length of its answer after reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from chairlift.errors import ChairliftError
from chairlift.grammar.answer_start import AnswerStart
from chairlift.grammar.compiler import GrammarCompiler, GrammarMatcher, num_words
from chairlift.kernels.sampling import Bits, IntArray
from chairlift.outputs import NewRequest
from chairlift.structured_outputs import Reasoning
from chairlift.worker.request_rows import RequestRows

ALL_BITS: Final = np.uint32(0xFFFFFFFF)
BITS: Final = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))


def bit_mask(token_ids: IntArray, vocab_size: int) -> Bits:
    """A mask with one bit for each token, set for these tokens."""
    bits: Bits = np.zeros(num_words(vocab_size), dtype=np.uint32)
    np.bitwise_or.at(bits, token_ids // 32, BITS[token_ids % 32])
    return bits


@dataclass(slots=True)
class _Grammar:
    """The state of one request in its grammar, and after its reasoning.

    Attributes:
        matcher: None without a grammar, or if it could not be compiled, for the reason in `error`.
        seen: the position of the first token that has not been read.
        early: the tokens that are masked until min_tokens, unless no other token is allowed.
        start: finds the beginning of the answer, from which `num_tokens` counts.
    """

    matcher: GrammarMatcher | None
    error: str | None
    seen: int
    early: Bits
    min_tokens: int
    start: AnswerStart
    num_tokens: int = 0


class TokenMasks:
    """The masks of constrained rows.

    A matcher reads the new tokens of its row when the next mask is needed. It therefore replays the output after a
    preemption, and the host waits for a device only if a request has a grammar.

    Args:
        rows: the tokens of the requests.
        grammars: the compiler; None if requests with a grammar are rejected on arrival.
    """

    def __init__(self, rows: RequestRows, vocab_size: int, grammars: GrammarCompiler | None) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._compiler = grammars
        self._grammars: dict[int, _Grammar] = {}
        self._allowed: dict[int, Bits] = {}
        self._bits: Bits = np.zeros((0, num_words(vocab_size)), dtype=np.uint32)
        self._last_allowed: tuple[Sequence[int], Bits] = (), self._bits

    def add(self, row: int, new: NewRequest) -> None:
        """Add a row. The compiler keeps its grammar, because it was compiled when the request arrived."""
        params = new.sampling_params
        if params.allowed_token_ids is not None:
            if self._last_allowed[0] is not params.allowed_token_ids:  # Siblings share the list.
                mask = bit_mask(np.array(params.allowed_token_ids, dtype=np.int64), self._vocab_size)
                self._last_allowed = params.allowed_token_ids, mask
            self._allowed[row] = self._last_allowed[1]
        if params.structured_outputs is None and not params.counts_after_reasoning:
            return
        stop = np.array([i for i in new.stop_token_ids if i < self._vocab_size], dtype=np.int64)
        matcher, error = None, None
        try:
            if params.structured_outputs is not None:
                assert self._compiler is not None, "without a compiler requests with a grammar are rejected"
                matcher = self._compiler.compile(params.structured_outputs).matcher()
        except ChairliftError as caught:
            error = str(caught)
        early = bit_mask(stop, self._vocab_size)
        start = AnswerStart(_as_bytes(params.reasoning) if params.counts_after_reasoning and self._compiler else None)
        self._grammars[row] = _Grammar(matcher, error, new.num_prompt_tokens, early, params.min_tokens, start)

    def remove(self, row: int) -> None:
        self._grammars.pop(row, None)
        self._allowed.pop(row, None)

    def fill(self, rows: IntArray) -> Bits:
        """Compute the masks of these rows: uint32 [len(rows), words], which the next call overwrites."""
        if len(self._bits) < len(rows):
            self._bits = np.zeros((len(rows), self._bits.shape[1]), dtype=np.uint32)
        bits = self._bits[: len(rows)]
        row_list = rows.tolist()
        in_grammars = [row for row in row_list if row in self._grammars]
        unseen = iter(self._rows.tokens_from(in_grammars, [self._grammars[row].seen for row in in_grammars]))
        for mask, row in zip(bits, row_list, strict=True):
            grammar = self._grammars.get(row)
            if grammar is None:
                mask[:] = self._allowed[row]
            else:
                self._fill_one(mask, row, grammar, next(unseen))
        return bits

    def error(self, row: int) -> str | None:
        """The error of a row whose grammar cannot continue; otherwise None."""
        grammar = self._grammars.get(row)
        if grammar is None:
            return None
        return grammar.error if grammar.matcher is None else grammar.matcher.error

    def _fill_one(self, mask: Bits, row: int, grammar: _Grammar, tokens: list[int]) -> None:
        if grammar.error is not None:
            mask[:] = grammar.early
            return
        grammar.seen += len(tokens)
        if grammar.matcher is None:
            mask[:] = self._allowed.get(row, ALL_BITS)
        else:
            grammar.matcher.advance(tokens)
            grammar.matcher.fill(mask)
        if grammar.num_tokens < grammar.min_tokens:
            self._count(grammar, tokens)
        if grammar.num_tokens < grammar.min_tokens:
            later = mask & ~grammar.early
            if later.any():
                mask[:] = later

    def _count(self, grammar: _Grammar, tokens: list[int]) -> None:
        """Count the tokens of the answer: the first one with a character behind the reasoning, and those after it."""
        for token in tokens:
            if not grammar.start.is_found and self._compiler is not None:
                grammar.start.add(self._compiler.token_text(token))
            grammar.num_tokens += grammar.start.is_found


def _as_bytes(form: Reasoning | None) -> Reasoning | None:
    """The strings of a form as `GrammarCompiler.token_text` spells them."""
    if form is None:
        return None
    opening, closing, answer, *ends = (
        text.encode().decode("latin-1") for text in (form.opening, form.closing, form.answer, *form.ends)
    )
    return replace(form, opening=opening, closing=closing, answer=answer, ends=tuple(ends))
