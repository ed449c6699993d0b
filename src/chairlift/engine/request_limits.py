"""RequestLimits: the limits of a single request, which follow from the model, the pool and the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.errors import ContextLengthError
from chairlift.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of a single request.

    Attributes:
        max_model_len: maximum number of prompt and output tokens.
        max_slots: maximum number of slots that the KV pool can allocate to one request.
        supports_priority: the scheduling policy uses priorities.
        max_new_tokens: maximum number of output tokens by the model's generation configuration, if any.
        is_pooling: requests generate no tokens. Their `max_tokens` is 1, and this token is never computed.
        beam_search_problem: why the engine has no beam search, with what to do; None if it has.
    """

    max_model_len: int
    max_slots: int
    supports_priority: bool = True
    max_new_tokens: int | None = None
    is_pooling: bool = False
    beam_search_problem: str | None = None

    def max_output_tokens(self, num_prompt_tokens: int) -> int:
        """Maximum number of output tokens. P prompt tokens and n output tokens write P + n - 1 slots."""
        if self.is_pooling:
            return min(self.max_model_len, self.max_slots) + 1 - num_prompt_tokens
        return min(self.max_model_len, self.max_slots + 1) - num_prompt_tokens

    def context_error(self, message: str, param: str, num_prompt_tokens: int) -> ContextLengthError:
        """The error for a request that does not fit, whose message contains the words by which clients recognize it."""
        context = self.max_output_tokens(0) - self.is_pooling
        text = f"{message} This model's maximum context length is {context} tokens."
        return ContextLengthError(text, param, num_prompt_tokens, self.max_output_tokens(0) - 1)

    def default_max_tokens(self, num_prompt_tokens: int) -> int:
        """Maximum number of output tokens of a request without `max_tokens`."""
        longest = self.max_output_tokens(num_prompt_tokens)
        return longest if self.max_new_tokens is None else min(longest, self.max_new_tokens)

    def num_logprobs(self, params: SamplingParams, num_prompt_tokens: int, vocab_size: int | None = None) -> int:
        """The largest number of logprobs of the answers to a prompt, or of those of all tokens with `vocab_size`."""
        room = self.default_max_tokens(num_prompt_tokens)
        lengths = (num_prompt_tokens, params.prompt_logprobs), (min(params.max_tokens or room, room), params.logprobs)
        return params.n * sum(length * ((vocab_size or k) + 1) for length, k in lengths if k is not None)
