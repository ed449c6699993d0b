"""Rate limits and concurrency limits of API keys."""

from __future__ import annotations

import math
from collections.abc import Callable

from chairlift.clock import format_duration
from chairlift.counts import counted
from chairlift.errors import OverloadedError, RequestError
from chairlift.server.access.keys import Key


class TokenBucket:
    """A token bucket: it refills at a rate per minute, which is also its capacity, and its level may become negative.
    Times are seconds of one monotonic clock."""

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._filled_at = now

    def level(self, now: float) -> float:
        """The available amount."""
        filled = self._level + max(0.0, now - self._filled_at) * self.per_minute / 60
        self._level, self._filled_at = min(self.per_minute, filled), now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Remove an amount, even if it is not available."""
        self._level = self.level(now) - amount

    def seconds_until(self, amount: float, now: float) -> float:
        return max(0.0, (amount - self.level(now)) * 60 / self.per_minute)


class KeyMeter:
    """Measures the use of one API key, and rejects calls that would exceed its limits. The units of its rates are
    "requests" and "tokens" per minute.

    Attributes:
        num_concurrent: the sequences of the key in progress on this server: one for each answer to each prompt, and one
            for each call that is not admitted yet.
        num_remote_concurrent: its sequences in progress on other servers.
    """

    def __init__(self, key: Key, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}
        self.num_concurrent = 0
        self.num_remote_concurrent = 0
        self._usage: dict[str, float] = {}
        self.set_limits(key)

    def take_usage(self) -> dict[str, float]:
        """Return what the key has used of this server since the last call, by unit."""
        usage, self._usage = self._usage, {}
        return usage

    def set_limits(self, key: Key) -> None:
        """Use the limits of this key from now on. A rate that does not change keeps what has been used of it; another
        one begins with a full minute."""
        self._key = key
        old, self._buckets = self._buckets, {}
        for unit, per_minute in (("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute)):
            if unit in old and old[unit].per_minute == per_minute:
                self._buckets[unit] = old[unit]
            elif per_minute is not None:
                self._buckets[unit] = TokenBucket(per_minute, self._clock())

    def check_call(self) -> None:
        """Raise OverloadedError if the key has reached its limit of concurrent sequences, or of requests per minute."""
        self.check_concurrent(1)
        self.check("requests", 1.0)

    def check_concurrent(self, needed: int, num_counted: int = 0) -> None:
        """Check that the key may have this number of sequences more in progress, of which some are counted already.

        Raises:
            OverloadedError: others must end before.
            RequestError: the limit is lower than the number alone.
        """
        if (limit := self._key.max_concurrent) is None:
            return
        name, others = self._key.name, self.num_concurrent + self.num_remote_concurrent - num_counted
        if needed > limit:
            message = (
                f"the call has {needed} sequences (answers to each prompt), and API key {name!r} has max_concurrent="
            )
            raise RequestError(f"{message}{limit}: ask for fewer answers, or send the prompts in several calls", "n")
        if others + needed > limit:
            message = (
                f"API key {name!r} has {counted(others, 'sequence')} (prompts times answers) in progress, the call has "
                f"{needed} more, and the limit is max_concurrent={limit}: wait until enough of them have ended"
            )
            raise OverloadedError(message, 1.0, "concurrent_limit_exceeded")

    def check(self, unit: str, needed: float) -> None:
        """Check that the key may use an amount now; with 0, that it has not used more than its limit.

        Raises:
            OverloadedError: the amount is not available, with the seconds until it is.
            RequestError: the amount is more than the key may use per minute.
        """
        if unit not in self._buckets:
            return
        bucket, now = self._buckets[unit], self._clock()
        allowed = f"API key {self._key.name!r} has {unit}_per_minute={bucket.per_minute:g}"
        if needed > max(1.0, bucket.per_minute):
            raise RequestError(f"the prompts have {needed:g} tokens, and {allowed}: shorten them", "prompt")
        if seconds := bucket.seconds_until(min(needed, bucket.per_minute), now):
            left = max(0, math.floor(bucket.level(now)))
            need = f" of the {needed:g} that this call needs" if needed > 1 else ""
            message = f"{allowed}, with {left} left{need}: try again in {format_duration(seconds)}"
            raise OverloadedError(message, seconds, "rate_limit_exceeded")

    def record(self, unit: str, amount: float) -> None:
        """Count an amount that the key has used of this server, even if it exceeds the limit."""
        self._usage[unit] = self._usage.get(unit, 0.0) + amount
        self.charge(unit, amount)

    def charge(self, unit: str, amount: float) -> None:
        """Remove an amount from what the key may use, without counting it for this server."""
        if unit in self._buckets:
            self._buckets[unit].take(amount, self._clock())
