"""ReturnGaps: the seconds after which the prefix of a finished request is used again, learned from those before it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final

PRIOR_RETURNS: Final = 4
"""The weight of the estimate for a more general kind, in returns."""

PRIOR_SECONDS: Final = 1.0
MAX_KINDS: Final = 4096


class ReturnGaps:
    """Estimates the mean idle time for each return. Prefixes that do not return have idle time only."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def record(self, kinds: Sequence[Hashable], idle: float, num_returns: int) -> None:
        """Add the idle time of a prefix, which was used again or given up, to its kinds, general ones first."""
        for kind in reversed(kinds):
            seconds, count = self._seen.pop(kind, (0.0, 0))
            self._seen[kind] = seconds + idle, count + num_returns
        while len(self._seen) > MAX_KINDS:
            self._seen.popitem(last=False)

    def expected(self, kinds: Sequence[Hashable]) -> float:
        """The estimate for the last kind. One that was seen rarely is close to that of the kind before it."""
        mean = PRIOR_SECONDS
        for kind in kinds:
            seconds, count = self._seen.get(kind, (0.0, 0))
            mean = (seconds + PRIOR_RETURNS * mean) / (count + PRIOR_RETURNS)
        return mean
