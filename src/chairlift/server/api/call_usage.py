"""The token counts and times of an API call."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.outputs import RequestOutput, RequestTimes
from chairlift.server.protocol.base import PromptTokensDetails, Timings, UsageInfo


@dataclass(slots=True)
class CallUsage:
    """The token counts and times of one API call, over all of its prompts and answers.

    Attributes:
        num_choices: the number of finished answers.
        times: the times of the answer that finished last.
        finish_reason: the reason of the answer that finished first.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_choices: int = 0
    times: RequestTimes | None = None
    finish_reason: str | None = None

    def add(self, output: RequestOutput) -> None:
        """Add an output: a complete answer, or a delta of one."""
        for answer in output.outputs:
            self.completion_tokens += len(answer.token_ids)
            self.num_choices += answer.finish_reason is not None
            self.finish_reason = self.finish_reason or answer.finish_reason
        self.cached_tokens += output.num_cached_tokens
        self.times = output.times or self.times

    def usage(self) -> UsageInfo:
        """The token counts in the form of OpenAI."""
        return UsageInfo(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
        )

    def timings(self) -> Timings | None:
        """The times in seconds, or None if no token was computed."""
        times = self.times
        if times is None or times.first_scheduled is None or times.first_token is None or times.finished is None:
            return None
        prefill = times.first_token - times.first_scheduled
        decode = times.finished - times.first_token
        return Timings(
            queue=times.first_scheduled - times.arrival,
            prefill=prefill,
            decode=decode,
            prompt_tokens_per_second=_rate(self.prompt_tokens - self.cached_tokens, prefill),
            output_tokens_per_second=_rate(self.completion_tokens - self.num_choices, decode),
        )


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def timing_headers(timings: Timings | None) -> dict[str, str]:
    """The header `Server-Timing` with the times in milliseconds (W3C Server Timing)."""
    if timings is None:
        return {}
    spans = {"queue": timings.queue, "prefill": timings.prefill, "decode": timings.decode}
    return {"Server-Timing": ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in spans.items())}
