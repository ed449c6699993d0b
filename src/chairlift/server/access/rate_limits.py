"""What one key may ask for in a minute, and at once."""

from __future__ import annotations

from chairlift.clock import format_duration
from chairlift.errors import OverloadedError, RequestError
from chairlift.server.access.keys import KeyLimits


class TokenBucket:
    """Fills up evenly, `per_minute` in a minute, and holds no more than that. May be overdrawn.

    Times are seconds of any one clock that does not jump.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._filled_at = now

    def level(self, now: float) -> float:
        """What may be taken."""
        filled = self._level + max(0.0, now - self._filled_at) * self.per_minute / 60
        self._level, self._filled_at = min(self.per_minute, filled), now
        return self._level

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def seconds_until(self, amount: float, now: float) -> float:
        """Until so much is in it; 0 if it is."""
        return max(0.0, (amount - self.level(now)) * 60 / self.per_minute)


class KeyMeter:
    """Counts what one key takes, and says when it is too much."""

    def __init__(self, name: str, limits: KeyLimits, now: float) -> None:
        self._name = name
        self._limits = limits
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        self._requests = None if requests is None else TokenBucket(requests, now)
        self._tokens = None if tokens is None else TokenBucket(tokens, now)
        cpu_seconds = limits.cpu_seconds_per_minute
        self._cpu_seconds = None if cpu_seconds is None else TokenBucket(cpu_seconds, now)
        self.num_concurrent = 0
        self.total_cpu_seconds = 0.0

    def check(self, num_prompt_tokens: int, now: float) -> None:
        """Raise if a call with such prompts may not begin now.

        Raises:
            OverloadedError: it may later, and says when.
            RequestError: it never may: its prompts alone are more than a minute's tokens.
        """
        self.check_call(now)
        self.check_tokens(num_prompt_tokens, now)

    def check_tokens(self, num_prompt_tokens: int, now: float) -> None:
        """Raise if prompts with so many tokens may not begin now; as `check`."""
        if self._tokens is not None:
            self._check(self._tokens, num_prompt_tokens, "tokens", now)

    def check_call(self, now: float) -> None:
        """Raise if no call may begin now, be it one that asks the engine for nothing.

        Raises:
            OverloadedError: it may later, and says when.
        """
        limit = self._limits.max_concurrent
        if limit is not None and self.num_concurrent >= limit:
            message = f"{limit} calls of API key {self._name!r} are being answered, its max_concurrent: wait for one"
            raise OverloadedError(message, 1.0, "concurrent_limit_exceeded")
        self._check_request(now)

    def check_cpu_seconds(self, now: float) -> None:
        """Raise if earlier calls have used more CPU time than the key may.

        Raises:
            OverloadedError: it may be called later, and says when.
        """
        if self._cpu_seconds is not None:
            self._check(self._cpu_seconds, 0.0, "cpu_seconds", now)

    def take_query(self, now: float) -> None:
        """A question about other calls: one of a minute's requests, and never one too many at once.

        Raises:
            OverloadedError: it may be asked later, and says when.
        """
        self._check_request(now)
        self._take_request(now)

    def _check_request(self, now: float) -> None:
        if self._requests is not None:
            self._check(self._requests, 1.0, "requests", now)

    def _take_request(self, now: float) -> None:
        if self._requests is not None:
            self._requests.take(1.0, now)

    def _check(self, bucket: TokenBucket, needed: float, unit: str, now: float) -> None:
        allowed = f"API key {self._name!r} has {unit}_per_minute={bucket.per_minute:g}"
        if needed > max(1.0, bucket.per_minute):
            raise RequestError(f"the prompts have {needed:g} tokens, and {allowed}: shorten them", "prompt")
        if seconds := bucket.seconds_until(min(needed, bucket.per_minute), now):
            message = (
                f"{allowed}, and {max(0.0, bucket.level(now)):.0f} are left: try again in {format_duration(seconds)}"
            )
            raise OverloadedError(message, seconds, "rate_limit_exceeded")

    def start_call(self, num_prompt_tokens: int, now: float) -> None:
        """A call that was checked begins."""
        self.num_concurrent += 1
        self._take_request(now)
        self.record_tokens(num_prompt_tokens, now)

    def record_tokens(self, num_tokens: int, now: float) -> None:
        if self._tokens is not None:
            self._tokens.take(num_tokens, now)

    def record_cpu_seconds(self, seconds: float, now: float) -> None:
        """Account for CPU time outside of the engine."""
        self.total_cpu_seconds += seconds
        if self._cpu_seconds is not None:
            self._cpu_seconds.take(seconds, now)

    def end_call(self) -> None:
        """A call is over."""
        self.num_concurrent -= 1
