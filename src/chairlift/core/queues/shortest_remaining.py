"""Shortest predicted remaining processing time, with limited preemption (TRAIL; Shahout et al., "Don't Stop Me Now:
Embedding Based Scheduling for LLMs", ICLR'25).

    rank of a request   before c * predicted output tokens   the work that is left: the smallest goes first
                        after                                first of all, and never displaced (settled)

A request is displaced only while it has generated less than c = 0.8 of its predicted length, so that a request close to
its end, which holds the most memory, is not computed again. Work is measured as the service of fair sharing: prompt
tokens to compute and output tokens to generate, by their costs. Tokens that a displaced request computes again do not
count, because they are usually in the prefix cache.

A request can wait as long as smaller ones arrive: SRPT has no bound for it. Predictions come from `length_predictors`;
TRAIL's are renewed with every token, these are made once, at the arrival.
"""

from __future__ import annotations

from typing import Final

from chairlift.core.queues.fair_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from chairlift.core.queues.request_queue import Key, RequestQueue
from chairlift.request import Request

MAX_DISPLACED_SHARE: Final = 0.8
"""c of the paper, with its value."""

SETTLED: Final = -1.0


def remaining_work(predicted_len: int, num_output_tokens: int, num_prompt_tokens: int) -> float:
    """The predicted work that is left of a request; SETTLED if it is not displaced any more.

    Args:
        num_prompt_tokens: those to be computed before the first output token.
    """
    if not num_output_tokens:
        return PROMPT_TOKEN_COST * num_prompt_tokens + OUTPUT_TOKEN_COST * predicted_len
    if num_output_tokens >= MAX_DISPLACED_SHARE * predicted_len:
        return SETTLED
    return OUTPUT_TOKEN_COST * (predicted_len - num_output_tokens)


class ShortestRemainingQueue(RequestQueue):
    """The request with the least predicted work first. Pending tokens count as generated."""

    has_constant_keys = False
    default_length_predictor = "history"

    def key(self, request: Request) -> Key:
        predicted, num_prompt_tokens = request.predicted_len, request.num_prompt_tokens
        assert predicted is not None, "the configuration has a length predictor"
        num_left = num_prompt_tokens - request.num_computed_tokens
        work = remaining_work(predicted, request.num_tokens - num_prompt_tokens, num_left)
        return (work, 0, request.arrival_index)

    def displaces(self, head: Request, running: Request) -> bool:
        left = self.key(running)[0]
        return left != SETTLED and self.key(head)[0] < left
