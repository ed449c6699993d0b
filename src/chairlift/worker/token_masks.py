"""Which tokens a constrained request may take next: by its grammar, or out of a list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from chairlift.errors import RequestError
from chairlift.grammar.compiler import GrammarCompiler, GrammarMatcher, num_words
from chairlift.kernels.sampling import Bits, IntArray
from chairlift.outputs import NewRequest
from chairlift.worker.request_rows import RequestRows

BITS: Final = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))


def bits_of(token_ids: IntArray, vocab_size: int) -> Bits:
    """A mask that allows these tokens."""
    bits: Bits = np.zeros(num_words(vocab_size), dtype=np.uint32)
    np.bitwise_or.at(bits, token_ids // 32, BITS[token_ids % 32])
    return bits


@dataclass(slots=True)
class _Grammar:
    """One answer in its grammar, which has seen the tokens before position `seen`.

    Attributes:
        matcher: None if the grammar cannot be compiled here; `error` says why.
        early: below min_tokens these tokens are masked, unless nothing else is left.
    """

    matcher: GrammarMatcher | None
    error: str | None
    seen: int
    early: Bits
    min_tokens: int


class TokenMasks:
    """The masks of the constrained rows; rows without a constraint are not known here.

    A grammar looks at its row's tokens when the next mask is due. So it advances by what was sampled, replays the
    answer after a preemption, and a device is waited for only by requests with a grammar.

    Args:
        rows: the requests; read for their tokens.
        grammars: compiles; None where requests with a grammar are refused at the door.
    """

    def __init__(self, rows: RequestRows, vocab_size: int, grammars: GrammarCompiler | None) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._compiler = grammars
        self._grammars: dict[int, _Grammar] = {}
        self._allowed: dict[int, Bits] = {}
        self._bits: Bits = np.zeros((0, num_words(vocab_size)), dtype=np.uint32)

    def add(self, row: int, new: NewRequest) -> None:
        """Whoever took the request in has compiled its grammar already; here it is looked up."""
        params = new.sampling_params
        if params.allowed_token_ids is not None:
            self._allowed[row] = bits_of(np.array(params.allowed_token_ids, dtype=np.int64), self._vocab_size)
        if params.structured_outputs is None:
            return
        assert self._compiler is not None, "without a compiler no grammar is let in"
        stop = np.array([i for i in new.stop_token_ids if i < self._vocab_size], dtype=np.int64)
        matcher, error = None, None
        try:
            matcher = self._compiler.compile(params.structured_outputs).matcher()
        except RequestError as refusal:
            error = str(refusal)
        early = bits_of(stop, self._vocab_size)
        self._grammars[row] = _Grammar(matcher, error, new.num_prompt_tokens, early, params.min_tokens)

    def remove(self, row: int) -> None:
        self._grammars.pop(row, None)
        self._allowed.pop(row, None)

    def fill(self, rows: IntArray) -> Bits:
        """The masks of these constrained rows, [len(rows), words]; overwritten by the next call."""
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
        """Why a row's grammar cannot go on, if it cannot."""
        grammar = self._grammars.get(row)
        if grammar is None:
            return None
        return grammar.error if grammar.matcher is None else grammar.matcher.error

    def _fill_one(self, mask: Bits, row: int, grammar: _Grammar, tokens: list[int]) -> None:
        if grammar.matcher is None:
            mask[:] = grammar.early
            return
        grammar.matcher.advance(tokens)
        grammar.seen += len(tokens)
        grammar.matcher.fill(mask)
        if grammar.min_tokens and grammar.seen - self._rows.num_prompt_tokens[row] < grammar.min_tokens:
            later = mask & ~grammar.early
            if later.any():
                mask[:] = later
