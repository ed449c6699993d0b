"""Rate limits and concurrency limits of API keys."""

from __future__ import annotations

from chairlift.clock import format_duration
from chairlift.errors import OverloadedError, RequestError
from chairlift.server.access.keys import KeyLimits


class TokenBucket:
    """A token bucket: it refills at a constant rate up to its capacity, and its level may become negative.

    Times are seconds of one monotonic clock.

    Args:
        per_minute: The refill rate per minute, which is also the capacity.
        now: The current time.
    """

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
        """The seconds until an amount is available."""
        return max(0.0, (amount - self.level(now)) * 60 / self.per_minute)


class KeyMeter:
    """Measures the use of one API key, and rejects calls that would exceed its limits.

    Its methods raise OverloadedError, with the seconds until a retry can succeed, if a limit has been reached.
    """

    def __init__(self, name: str, limits: KeyLimits, now: float) -> None:
        self._name = name
        self._limits = limits
        self._buckets = {
            unit: TokenBucket(per_minute, now)
            for unit in ("requests", "tokens", "cpu_seconds")
            if (per_minute := getattr(limits, f"{unit}_per_minute")) is not None
        }
        self.num_concurrent = 0
        self.total_cpu_seconds = 0.0

    def check_tokens(self, num_prompt_tokens: int, now: float) -> None:
        """Check that prompts with this many tokens may start now.

        Raises:
            RequestError: The prompts have more tokens than the key may use per minute.
        """
        self._check("tokens", num_prompt_tokens, now)

    def check_call(self, now: float) -> None:
        """Check that one more call may start now."""
        limit = self._limits.max_concurrent
        if limit is not None and self.num_concurrent >= limit:
            message = (
                f"API key {self._name!r} has {limit} calls in progress, and its limit is max_concurrent={limit}: "
                "wait until one of them has ended"
            )
            raise OverloadedError(message, 1.0, "concurrent_limit_exceeded")
        self._check("requests", 1.0, now)

    def check_cpu_seconds(self, now: float) -> None:
        """Check that earlier calls have not used more CPU time than the key may use."""
        self._check("cpu_seconds", 0.0, now)

    def admit_query(self, now: float) -> None:
        """Admit a query about other calls: it counts as a request, but not as a concurrent call."""
        self._check("requests", 1.0, now)
        self._take("requests", 1.0, now)

    def record_call(self, num_prompt_tokens: int, now: float) -> None:
        """Count an admitted call and its prompt tokens."""
        self._take("requests", 1.0, now)
        self._take("tokens", num_prompt_tokens, now)

    def record_tokens(self, num_tokens: int, now: float) -> None:
        """Count output tokens."""
        self._take("tokens", num_tokens, now)

    def record_cpu_seconds(self, seconds: float, now: float) -> None:
        """Count CPU time outside of the engine."""
        self.total_cpu_seconds += seconds
        self._take("cpu_seconds", seconds, now)

    def _take(self, unit: str, amount: float, now: float) -> None:
        if unit in self._buckets:
            self._buckets[unit].take(amount, now)

    def _check(self, unit: str, needed: float, now: float) -> None:
        if unit not in self._buckets:
            return
        bucket = self._buckets[unit]
        allowed = f"API key {self._name!r} has {unit}_per_minute={bucket.per_minute:g}"
        if needed > max(1.0, bucket.per_minute):
            raise RequestError(f"the prompts have {needed:g} tokens, and {allowed}: shorten them", "prompt")
        if seconds := bucket.seconds_until(min(needed, bucket.per_minute), now):
            left = max(0.0, bucket.level(now))
            message = f"{allowed}, and {left:.0f} are left: try again in {format_duration(seconds)}"
            raise OverloadedError(message, seconds, "rate_limit_exceeded")
