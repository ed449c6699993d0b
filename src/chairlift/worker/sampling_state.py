"""The sampling parameters of running requests, in preallocated arrays with one row for each request."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from functools import reduce
from operator import or_

import numpy as np
import numpy.typing as npt

from chairlift.kernels.sampling import IntArray, SamplingParameters
from chairlift.outputs import NewRequest
from chairlift.sampling_params import SamplingParams
from chairlift.worker.random_stream import stream_key

MIN_TEMPERATURE = 1e-20
"""Smaller temperatures are replaced by this one, because a float32 division of logits would give 0/0."""

ANY_TOKEN = -1


class SamplingFeature(enum.IntFlag):
    """The optional parts of sampling that a request needs. A step computes only those that a request in it needs."""

    NONE = 0
    PENALTIES = enum.auto()
    LOGIT_BIAS = enum.auto()
    MIN_TOKENS = enum.auto()
    LOGPROBS = enum.auto()
    PROMPT_LOGPROBS = enum.auto()
    MASK = enum.auto()
    BAD_WORDS = enum.auto()


class BadWords:
    """The words that the output of one request must not contain.

        before[i]   ANY ANY a b     word a b c: after "... a b" the token c is masked
        last[i]     c

    Args:
        words: token ids, at least one for each word.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.max_before = max(len(word) for word in words) - 1
        self._last: IntArray = np.array([word[-1] for word in words], dtype=np.int64)
        self._before: IntArray = np.full((len(words), self.max_before), ANY_TOKEN, dtype=np.int64)
        for line, word in zip(self._before, words, strict=True):
            line[self.max_before - len(word) + 1 :] = word[:-1]

    def completing_tokens(self, output: Sequence[int]) -> IntArray:
        """The tokens that would complete a word.

        Args:
            output: the last `max_before` output tokens, or all if there are fewer.
        """
        if not self.max_before:
            return self._last
        tail = np.full(self.max_before, ANY_TOKEN - 1, dtype=np.int64)
        tail[self.max_before - len(output) :] = output
        is_next = ((self._before == tail) | (self._before == ANY_TOKEN)).all(axis=1)
        return np.compress(is_next, self._last)


class SamplingState:
    """The parameters by row. Parameters without effect have the values top_k 0, top_p 1, min_p 0, penalties 1, 0, 0.

    Attributes:
        features: uint8, a `SamplingFeature`.
        num_with_features: number of rows that need a feature.
        is_random: uint8, 0 for greedy sampling.
        keys: uint64, the key of the request's random stream.
        penalties: float32 [3, rows]: repetition, presence, frequency.
        bias: row -> (token ids int64, amounts float32), for rows with LOGIT_BIAS.
        stop_ids: row -> int64 ids of the stop tokens that are masked until min_tokens, for rows with MIN_TOKENS. Rows
            with a grammar, or that count after their reasoning, are not among them, because their mask contains it.
        bad_words: row -> words, for rows with BAD_WORDS.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.features = np.zeros(max_num_seqs, dtype=np.uint8)
        self.num_with_features = 0
        self.is_random = np.zeros(max_num_seqs, dtype=np.uint8)
        self.keys = np.zeros(max_num_seqs, dtype=np.uint64)
        self.temperature = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float64)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.penalties = np.zeros((3, max_num_seqs), dtype=np.float32)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self.bias: dict[int, tuple[IntArray, npt.NDArray[np.float32]]] = {}
        self.stop_ids: dict[int, IntArray] = {}
        self._last_stop: tuple[Collection[int], IntArray] = (), np.zeros(0, dtype=np.int64)
        self.bad_words: dict[int, BadWords] = {}

    def add(self, row: int, new: NewRequest) -> None:
        """Give a row the sampling parameters of a new request.

        The input processor has checked that all token ids are in the vocabulary, and has tokenized bad words.
        """
        params = new.sampling_params
        self.keys[row] = stream_key(new.seed)
        self.is_random[row] = params.temperature > 0 and params.top_p > 0 and params.top_k != 1
        self.temperature[row] = max(params.temperature, MIN_TEMPERATURE)
        self.top_k[row] = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.penalties[:, row] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self.min_tokens[row] = params.min_tokens
        self.num_logprobs[row] = self._num_top(params.logprobs)
        if params.use_beam_search:
            # As many tokens that do not end a beam as there are beams, whichever tokens end it.
            num_compared = max(params.n + len(new.stop_token_ids), params.logprobs or 0)
            self.num_logprobs[row] = min(num_compared, self.vocab_size)
        self.num_prompt_logprobs[row] = self._num_top(params.prompt_logprobs)
        if params.logit_bias:
            self.bias[row] = (
                np.array(list(params.logit_bias), dtype=np.int64),
                np.array(list(params.logit_bias.values()), dtype=np.float32),
            )
        if params.bad_words:
            self.bad_words[row] = BadWords([word for word in params.bad_words if not isinstance(word, str)])
        if params.min_tokens and params.structured_outputs is None and not params.counts_after_reasoning:
            if self._last_stop[0] is not new.stop_token_ids:  # Siblings share them.
                stop_ids = np.fromiter(new.stop_token_ids, dtype=np.int64)
                self._last_stop = new.stop_token_ids, stop_ids[stop_ids < self.vocab_size]
            self.stop_ids[row] = self._last_stop[1]
        features = self._features(row, params)
        self.features[row] = features
        self.num_with_features += bool(features)

    def parameters(self, positions: IntArray) -> SamplingParameters:
        """The arrays that the sampling kernels read; `positions` has the position of the next token by row."""
        return SamplingParameters(
            self.is_random, self.temperature, self.top_k, self.top_p, self.min_p, self.keys, positions
        )

    def remove(self, row: int) -> None:
        self.num_with_features -= bool(self.features[row])
        self.features[row] = 0
        self.bias.pop(row, None)
        self.stop_ids.pop(row, None)
        self.bad_words.pop(row, None)

    def _num_top(self, num_logprobs: int | None) -> int:
        """The number of likely tokens whose logprobs are returned; -1 is the whole vocabulary."""
        return self.vocab_size if num_logprobs == -1 else num_logprobs or 0

    def _features(self, row: int, params: SamplingParams) -> SamplingFeature:
        has_penalties = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        is_needed = {
            SamplingFeature.PENALTIES: has_penalties,
            SamplingFeature.LOGIT_BIAS: params.logit_bias,
            SamplingFeature.MIN_TOKENS: len(self.stop_ids.get(row, ())),
            SamplingFeature.LOGPROBS: params.logprobs is not None or params.use_beam_search,
            SamplingFeature.PROMPT_LOGPROBS: params.prompt_logprobs is not None,
            SamplingFeature.MASK: params.structured_outputs is not None
            or params.allowed_token_ids is not None
            or params.counts_after_reasoning,
            SamplingFeature.BAD_WORDS: params.bad_words,
        }
        return reduce(or_, (feature for feature, needed in is_needed.items() if needed), SamplingFeature.NONE)
