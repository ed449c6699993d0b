"""A request and its progress.

    0            num_computed_tokens         num_tokens              max_total_tokens
    |-- K, V scheduled --|-- to be computed --|-- not yet sampled ------|
    |-- prompt (num_prompt_tokens) --|-- output --|

A request has no phases. Steps compute tokens until `num_computed_tokens` equals `num_tokens`; the step that reaches it
samples the next token. Both numbers advance when a step is scheduled: the device runs steps in order, so a later step
may read the K and V of an earlier one. `num_tokens` therefore includes `num_pending_tokens` tokens that are sampled by
scheduled steps, and that the device has not returned yet:

    len(token_ids) + num_pending_tokens == num_tokens <= end_total_tokens <= max_total_tokens

The scheduler and the running batch write its status, the running batch its counters, the KV cache manager `num_slots`,
and the methods below the values of its tokens.
"""

from __future__ import annotations

import enum
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any

from chairlift.outputs import NewRequest
from chairlift.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    """The state of a request. PARKED: waits until its leader has computed the prompt; WAITING: is in the queue."""

    PARKED = 0
    WAITING = 1
    RUNNING = 2
    FINISHED = 3


class FinishReason(enum.StrEnum):
    """Why a request ended, with OpenAI's values where they exist. TIMEOUT: the deadline of the request passed."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


class WaitReason(enum.StrEnum):
    """Why a waiting request was not admitted.

    SEATS: max_num_seqs requests are running, beams need more seats than are free, or a static batch is full.
    MEMORY: there are too few free blocks. For a static batch these are the blocks of all members at maximum length.
    SIBLING_PREFILL: its leader has not computed the shared prompt yet.
    PENDING_TOKEN: it was preempted, and the device has not returned its last token yet.
    PREEMPTION: a running request was preempted in this step, so no request is admitted.
    BATCH: a static batch was already closed when it reached the head of the queue. A request that was at the head when
        the batch closed keeps its earlier reason while the batch runs.
    TOKEN_BUDGET: the rest of the token budget of the step is smaller than its tokens, which must be computed at once.
    FAIRNESS: another tenant, which received less service, has its turn. The head of the queue belongs to that tenant
        and has the reason why no request is admitted.
    """

    SEATS = "seats"
    MEMORY = "memory"
    SIBLING_PREFILL = "sibling_prefill"
    PENDING_TOKEN = "pending_token"
    PREEMPTION = "preemption"
    BATCH = "batch"
    TOKEN_BUDGET = "token_budget"
    FAIRNESS = "fairness"


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence in the engine, with its tokens and its progress.

    Args:
        request_id: unique among the unfinished requests.
        prompt_token_ids: at least one token.
        sampling_params: `n` is 1, or the number of beams; siblings are separate requests, with one `leader_id`.
        max_tokens: maximum number of output tokens.
        stop_token_ids: tokens that end the output, including EOS unless it is ignored.
        arrival_time: seconds of the engine's clock.
        priority: a smaller number is scheduled first under the priority policy.
        leader_id: the sibling that computes the shared prompt, if this request waits for it.
        output_len: the number of output tokens, if it is forced.
        tenant: the unit of fair scheduling.
        cache_salt: KV blocks are shared only between requests with the same salt.
        deadline: seconds of the engine's clock after which the request is aborted.
        lora_id: the number of a LoRA adapter, which no other load of an adapter has; 0 for none.

    Attributes:
        max_total_tokens: the largest number of prompt and output tokens; `end_total_tokens` is smaller if a shorter
            output is forced.
        num_slots: the number of tokens for which there is KV memory.
        num_seats: the places in the batch that it takes when it is admitted, and leaves at its end.
        group: the `BeamGroup` of the unfinished beam search that the request is a part of; None for other requests.
        arrival_index: the position among all requests in the order of arrival.
        predicted_len: the number of output tokens that was predicted at its arrival; None without a prediction.
        meter: what `core.measuring` keeps about the request, which has no influence on scheduling.
    """

    request_id: str
    prompt_token_ids: InitVar[list[int]]
    sampling_params: SamplingParams
    max_tokens: InitVar[int]
    _: KW_ONLY
    stop_token_ids: frozenset[int] = frozenset()
    arrival_time: float = 0.0
    priority: int = 0
    leader_id: str | None = None
    output_len: int | None = None
    seed: int = 0
    tenant: str = ""
    cache_salt: str | None = None
    deadline: float | None = None
    lora_id: int = 0

    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    num_computed_tokens: int = field(default=0, init=False)
    max_total_tokens: int = field(init=False)
    end_total_tokens: int = field(init=False)
    num_slots: int = field(default=0, init=False)
    num_seats: int = field(default=1, init=False)
    group: Any = field(default=None, init=False)
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    arrival_index: int = field(default=-1, init=False)
    predicted_len: int | None = field(default=None, init=False)
    num_preemptions: int = field(default=0, init=False)
    meter: Any = field(default=None, init=False)

    def __post_init__(self, prompt_token_ids: list[int], max_tokens: int) -> None:
        assert prompt_token_ids, "a request has at least one prompt token"
        assert self.sampling_params.n == 1 or self.sampling_params.use_beam_search, "siblings are their own requests"
        assert max_tokens >= 1
        assert self.output_len is None or 1 <= self.output_len <= max_tokens
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = self.num_tokens = len(prompt_token_ids)
        self.max_total_tokens = self.num_prompt_tokens + max_tokens
        self.end_total_tokens = self.num_prompt_tokens + (max_tokens if self.output_len is None else self.output_len)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that a scheduled step samples, and that the device has not returned yet."""
        return self.num_tokens - len(self.token_ids)

    @property
    def is_prompt_computed(self) -> bool:
        return self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append_sampled(self, tokens: list[int]) -> list[int]:
        """Append the sampled tokens of one step, the first of which replaces the oldest pending token.

        Returns the appended tokens: up to and including the first stop token, or up to the length limit.
        """
        if len(tokens) > 1:
            tokens = self._until_end(tokens)
        self.token_ids += tokens
        self.num_tokens += len(tokens) - 1
        return tokens

    def _until_end(self, tokens: list[int]) -> list[int]:
        tokens = tokens[: self.end_total_tokens - len(self.token_ids)]
        stops = (index for index, token in enumerate(tokens, start=1) if token in self.stop_token_ids)
        return tokens[: next(stops, len(tokens))]

    def drop_pending(self) -> None:
        """Remove the oldest pending token, which the device will not return."""
        self.num_tokens -= 1

    def new_request(self, block_ids: list[list[int]], checkpoint: int | None = None) -> NewRequest:
        """The record that adds the request to the executor; `block_ids` is a copy of its block tables."""
        return NewRequest(
            request_id=self.request_id,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=block_ids,
            sampling_params=self.sampling_params,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            lora_id=self.lora_id,
            checkpoint=checkpoint,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, computed {self.num_computed_tokens}/{self.num_tokens}, "
            f"prompt {self.num_prompt_tokens}, max {self.max_total_tokens})"
        )
