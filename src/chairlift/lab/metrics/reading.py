"""The quality of experience (QoE) of a stream, after Andes (Liu et al., 2024, arXiv 2404.16283v2, section 3).

    QoE = 1 - S_delay / S_whole

A reader reads each token when it has arrived and the token before it is read. S_delay is the sum, over the tokens, of
the time by which this is later than expected: the first token at the expected time, and the others at the speed of the
reader. S_whole is the sum of the time from then to the end of reading. QoE is 1 if the reader never waits.
"""

from __future__ import annotations

from typing import Final

from chairlift.slo import SLO

DEFAULT_TOKENS_PER_SECOND: Final = 5.3
"""238 words per minute, the mean of silent reading (Brysbaert, 2019), at four tokens for three words."""

EXPECTED_TTFT_SECONDS: Final = 1.0
"""The expected time to first token of a request without an objective."""


class ReadingCurve:
    """The tokens of one stream as they are read.

    Args:
        tokens_per_second: the speed of the reader.
        slo: its `ttft_ms` is the expected time to first token.
    """

    __slots__ = ("_expected", "_gap", "_num_tokens", "_read", "_sum_delay", "_sum_expected")

    def __init__(self, tokens_per_second: float, slo: SLO | None = None) -> None:
        ttft_ms = None if slo is None else slo.ttft_ms
        self._gap = 1 / tokens_per_second
        self._expected = self._read = EXPECTED_TTFT_SECONDS if ttft_ms is None else ttft_ms / 1e3
        self._num_tokens = 0
        self._sum_delay = self._sum_expected = 0.0

    def add(self, seconds: float) -> None:
        """Add a token that arrived so many seconds after the request."""
        self._read = max(seconds, self._read)
        self._sum_delay += self._read - self._expected
        self._sum_expected += self._expected
        self._num_tokens += 1
        self._read += self._gap
        self._expected += self._gap

    def qoe(self) -> float | None:
        """The QoE of the tokens so far; None if there are none."""
        if not self._num_tokens:
            return None
        return 1 - self._sum_delay / (self._num_tokens * self._read - self._sum_expected)
