"""The rate at which the engine serves its queue, measured from outside, to estimate waiting times."""

from __future__ import annotations


class ServiceRate:
    """Measures how many requests and prompt tokens reach their first token per second of a non-empty queue.

    Older measurements count less: after `HALF_LIFE` seconds with a non-empty queue they count half. All times are
    seconds of one monotonic clock.
    """

    HALF_LIFE = 30.0

    def __init__(self) -> None:
        self._seconds = 0.0
        self._requests = 0.0
        self._tokens = 0.0
        self._token_seconds: float | None = None
        self._waiting_since: float | None = None

    def set_waiting(self, is_waiting: bool, now: float) -> None:
        """Record whether any request waits for its first token from now on."""
        if self._waiting_since is not None:
            passed = max(0.0, now - self._waiting_since)
            keep = 0.5 ** (passed / self.HALF_LIFE)
            self._seconds = self._seconds * keep + passed
            self._requests *= keep
            self._tokens *= keep
        self._waiting_since = now if is_waiting else None

    def record_first_token(self, num_prompt_tokens: int) -> None:
        """Record that a request with this many prompt tokens has received its first token."""
        self._requests += 1
        self._tokens += num_prompt_tokens

    def record_output(self, seconds: float, num_tokens: int) -> None:
        """Record a finished output: its number of tokens, and the seconds from its first token to its last."""
        if num_tokens > 1:
            last = seconds / (num_tokens - 1)
            self._token_seconds = last if self._token_seconds is None else 0.8 * self._token_seconds + 0.2 * last

    def seconds_until_first_token(self, num_requests: int, num_prompt_tokens: int) -> float | None:
        """The estimated seconds until this many requests and prompt tokens have been served.

        The estimate is the smaller one of the estimates by requests and by tokens, so that it is a lower bound. It is
        None if nothing has been measured.
        """
        if not self._requests or not self._seconds:
            return None
        by_requests = num_requests * self._seconds / self._requests
        return min(by_requests, num_prompt_tokens * self._seconds / max(1.0, self._tokens))

    def seconds_for_output(self, num_tokens: int) -> float:
        """The estimated seconds from the first token of an output to its last; 0 if nothing has been measured."""
        return max(0, num_tokens - 1) * (self._token_seconds or 0.0)
