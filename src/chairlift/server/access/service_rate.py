"""How fast the engine gets through its queue, as seen from outside: what a wait will be, roughly."""

from __future__ import annotations


class ServiceRate:
    """Requests and prompt tokens that got their first token, by the second of time in which anybody waited for one.

    Both sums fade, so what was half a minute of waiting ago counts half. Times are seconds of any one clock that does
    not jump.
    """

    HALF_LIFE = 30.0

    def __init__(self) -> None:
        self._seconds = 0.0
        self._requests = 0.0
        self._tokens = 0.0
        self._token_seconds: float | None = None
        self._waiting_since: float | None = None

    def set_waiting(self, is_waiting: bool, now: float) -> None:
        """Whether anybody waits for a first token from now on."""
        if self._waiting_since is not None:
            passed = max(0.0, now - self._waiting_since)
            keep = 0.5 ** (passed / self.HALF_LIFE)
            self._seconds = self._seconds * keep + passed
            self._requests *= keep
            self._tokens *= keep
        self._waiting_since = now if is_waiting else None

    def record_first_token(self, num_prompt_tokens: int) -> None:
        """A request got its first token."""
        self._requests += 1
        self._tokens += num_prompt_tokens

    def record_answer(self, seconds: float, num_tokens: int) -> None:
        """An answer took so long from its first token to its last."""
        if num_tokens > 1:
            last = seconds / (num_tokens - 1)
            self._token_seconds = last if self._token_seconds is None else 0.8 * self._token_seconds + 0.2 * last

    def seconds_until_first_token(self, num_requests: int, num_prompt_tokens: int) -> float | None:
        """Until so much is through; None while nothing was seen. It is the lesser of what requests and what tokens
        say: a lower bound where the one or the other is what takes time."""
        if not self._requests or not self._seconds:
            return None
        by_requests = num_requests * self._seconds / self._requests
        return min(by_requests, num_prompt_tokens * self._seconds / max(1.0, self._tokens))

    def seconds_for_output(self, num_tokens: int) -> float:
        """From the first token of an answer to its last; 0 while nothing was seen."""
        return max(0, num_tokens - 1) * (self._token_seconds or 0.0)
