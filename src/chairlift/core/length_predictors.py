"""Predictors of output lengths (`--length-predictor`), by which the policy `srpt` orders requests.

    none         no prediction
    max_tokens   the limit of the request
    history:Q    the quantile Q (0.5 without it) of the latest outputs of the tenant after the same start of the prompt;
                 while there are few, of all its outputs, then of all tenants, then max_tokens
    oracle       the true length, if it is forced

A request is predicted once, when it arrives. Events have the prediction, from which metrics compute its error.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Final

from chairlift.errors import RequestError
from chairlift.request import FinishReason, Request

PREFIX_TOKENS: Final = 32
"""Requests with the same first tokens have one history: a system prompt, or the first turn of a conversation."""

MAX_HISTORIES: Final = 1024
MAX_LENGTHS: Final = 64
"""Bounds of the memory: the histories, of which the oldest is dropped, and the latest lengths of each."""

MIN_LENGTHS: Final = 5
"""A history with fewer lengths is not used."""

DEFAULT_QUANTILE: Final = 0.5


def forced_output_len(request: Request, policy: str, alternative: str) -> int:
    """The number of output tokens of a request, if it is forced.

    Args:
        policy: why the length must be known; alternative: the options that do not need it.

    Raises:
        RequestError: it is not forced.
    """
    if request.output_len is None:
        raise RequestError(
            f"{policy}, which is known only if it is forced: set ignore_eos and "
            f"max_tokens, without stop strings or stop_token_ids. Choose {alternative} to serve other requests.",
            "ignore_eos",
        )
    return request.output_len


class LengthPredictor:
    """Predicts nothing; a subclass predicts the number of output tokens of a request that arrives."""

    def predict(self, request: Request) -> int | None:
        return None

    def record(self, request: Request) -> None:
        """Called when a request has ended."""


class MaxTokensPredictor(LengthPredictor):
    """The largest number of output tokens that the request allows."""

    def predict(self, request: Request) -> int:
        return request.max_total_tokens - request.num_prompt_tokens


class OraclePredictor(LengthPredictor):
    """The true output length.

    Raises:
        RequestError: the length of a request is not forced, so it is not known (in `predict`).
    """

    def predict(self, request: Request) -> int:
        policy = "length_predictor=oracle needs the output length"
        return forced_output_len(request, policy, "--length-predictor history or max_tokens")


class HistoryPredictor(MaxTokensPredictor):
    """A quantile of the lengths of earlier outputs, at most the limit of the request."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._histories: OrderedDict[tuple[str | None, tuple[int, ...]], deque[int]] = OrderedDict()

    def predict(self, request: Request) -> int:
        limit = super().predict(request)
        for key in self._keys(request):
            lengths = self._histories.get(key, ())
            if len(lengths) >= MIN_LENGTHS:
                return min(limit, sorted(lengths)[math.ceil(self._quantile * len(lengths)) - 1])
        return limit

    def record(self, request: Request) -> None:
        if request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        for key in self._keys(request):
            self._histories.setdefault(key, deque(maxlen=MAX_LENGTHS)).append(max(1, request.num_output_tokens))
            self._histories.move_to_end(key)
        while len(self._histories) > MAX_HISTORIES:
            self._histories.popitem(last=False)

    def _keys(self, request: Request) -> Iterator[tuple[str | None, tuple[int, ...]]]:
        """The histories of the request, the most specific one first."""
        prefix = request.token_ids[: min(PREFIX_TOKENS, request.num_prompt_tokens)]
        yield request.tenant, tuple(prefix)
        yield request.tenant, ()
        yield None, ()


def make_length_predictor(name: str) -> LengthPredictor:
    """Create the predictor that the option names, without histories."""
    kind, _, quantile = name.partition(":")
    if kind == "history":
        return HistoryPredictor(float(quantile or DEFAULT_QUANTILE))
    return {"none": LengthPredictor, "max_tokens": MaxTokensPredictor, "oracle": OraclePredictor}[kind]()
