"""Sampling parameters of the running requests, one row of preallocated arrays each."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from chairlift.kernels.sampling import IntArray, SamplingParameters
from chairlift.outputs import NewRequest
from chairlift.sampling_params import SamplingParams
from chairlift.worker.bad_words import BadWords
from chairlift.worker.random_stream import stream_key

MIN_TEMPERATURE = 1e-20
"""Below this a float32 division of logits would give 0/0; the distribution is the limit already."""


class SamplingFeature(enum.IntFlag):
    """What a request asks of the sampler beyond a token of its logits; a step does only what somebody in it needs."""

    NONE = 0
    PENALTIES = enum.auto()
    LOGIT_BIAS = enum.auto()
    MIN_TOKENS = enum.auto()
    LOGPROBS = enum.auto()
    PROMPT_LOGPROBS = enum.auto()
    MASK = enum.auto()
    BAD_WORDS = enum.auto()


class SamplingState:
    """Parameters by row, in neutral form: top_k 0, top_p 1, min_p 0 and penalties 1, 0, 0 change nothing.

    Attributes:
        needs: uint8, `SamplingFeature`.
        num_with_features: rows that need anything.
        is_random: uint8, 0 where the likeliest token is wanted.
        keys: uint64, of the request's random stream.
        bias: row -> (token ids int64, amounts float32), for rows with SamplingFeature.LOGIT_BIAS.
        stop_ids: row -> token ids int64 masked below min_tokens, for rows with SamplingFeature.MIN_TOKENS: those with
            min_tokens, but for structured ones, where it is part of the mask.
        bad_words: for rows with SamplingFeature.BAD_WORDS.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.needs = np.zeros(max_num_seqs, dtype=np.uint8)
        self.num_with_features = 0
        self.is_random = np.zeros(max_num_seqs, dtype=np.uint8)
        self.keys = np.zeros(max_num_seqs, dtype=np.uint64)
        self.temperature = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float64)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.repetition_penalty = np.ones(max_num_seqs, dtype=np.float32)
        self.presence_penalty = np.zeros(max_num_seqs, dtype=np.float32)
        self.frequency_penalty = np.zeros(max_num_seqs, dtype=np.float32)
        self.min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self.bias: dict[int, tuple[IntArray, npt.NDArray[np.float32]]] = {}
        self.stop_ids: dict[int, IntArray] = {}
        self.bad_words: dict[int, BadWords] = {}

    def add(self, row: int, new: NewRequest) -> None:
        """Fill a row. All token ids lie in the vocabulary, and bad words are token ids: whoever took the request in has
        seen to it."""
        params = new.sampling_params
        self.keys[row] = stream_key(new.seed)
        self.is_random[row] = not params.is_greedy and params.top_k != 1
        self.temperature[row] = max(params.temperature, MIN_TEMPERATURE)
        self.top_k[row] = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.repetition_penalty[row] = params.repetition_penalty
        self.presence_penalty[row] = params.presence_penalty
        self.frequency_penalty[row] = params.frequency_penalty
        self.min_tokens[row] = params.min_tokens
        self.num_logprobs[row] = params.logprobs or 0
        self.num_prompt_logprobs[row] = params.prompt_logprobs or 0
        if params.logit_bias:
            self.bias[row] = (
                np.array(list(params.logit_bias), dtype=np.int64),
                np.array(list(params.logit_bias.values()), dtype=np.float32),
            )
        if params.bad_words:
            self.bad_words[row] = BadWords([word for word in params.bad_words if not isinstance(word, str)])
        if params.min_tokens and params.structured_outputs is None:
            stop_ids = np.array(new.stop_token_ids, dtype=np.int64)
            self.stop_ids[row] = stop_ids[stop_ids < self.vocab_size]
        needs = self._needs(row, params)
        self.needs[row] = needs
        self.num_with_features += bool(needs)

    def parameters(self, positions: IntArray) -> SamplingParameters:
        """These arrays, as the kernels read them. positions: of the next token, by row."""
        return SamplingParameters(
            self.is_random, self.temperature, self.top_k, self.top_p, self.min_p, self.keys, positions
        )

    def remove(self, row: int) -> None:
        self.num_with_features -= bool(self.needs[row])
        self.needs[row] = 0
        self.bias.pop(row, None)
        self.stop_ids.pop(row, None)
        self.bad_words.pop(row, None)

    def _needs(self, row: int, params: SamplingParams) -> SamplingFeature:
        needs = SamplingFeature.NONE
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            needs |= SamplingFeature.PENALTIES
        if params.logit_bias:
            needs |= SamplingFeature.LOGIT_BIAS
        if row in self.stop_ids and len(self.stop_ids[row]):
            needs |= SamplingFeature.MIN_TOKENS
        if params.logprobs is not None:
            needs |= SamplingFeature.LOGPROBS
        if params.prompt_logprobs is not None:
            needs |= SamplingFeature.PROMPT_LOGPROBS
        if params.structured_outputs is not None or params.allowed_token_ids is not None:
            needs |= SamplingFeature.MASK
        if params.bad_words:
            needs |= SamplingFeature.BAD_WORDS
        return needs
