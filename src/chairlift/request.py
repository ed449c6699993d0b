"""A request and its progress.

    0            num_computed_tokens         num_tokens              max_total_tokens
    |-- K, V in memory --|-- to be computed --|-- not yet known --------|
    |-- prompt (num_prompt_tokens) --|-- output --|

There are no phases: `num_computed_tokens` chases `num_tokens`. When it has caught up, the next token is sampled and
`num_tokens` moves on. `num_tokens` counts tokens whose value is still on its way from the device
(`num_pending_tokens` of them), so a step can be planned before the last one is answered:

    len(token_ids) + num_pending_tokens == num_tokens <= end_total_tokens <= max_total_tokens

`max_total_tokens` is what was asked for; `end_total_tokens` is less where a shorter length is forced.

`num_slots` says how far the held KV memory reaches; the KV cache manager alone writes it.

A member of a static batch that has ended runs on, `done_time` and `finish_reason` set, until the batch is over.

Slot-seconds are kept without a loop over time: slots taken at t1, t2 ... and given back at T were held for
n * T - (t1 + t2 + ...), and the sum in brackets is the moment. `hold_moment` sums over slots held, `write_moment` over
slots written.
"""

from __future__ import annotations

import enum
from dataclasses import KW_ONLY, InitVar, dataclass, field

from chairlift.outputs import EngineCoreOutput, NewRequest, RequestStats, RequestTimes
from chairlift.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    """PARKED waits for its leader's prompt (see `Scheduler`); WAITING is in the queue."""

    PARKED = 0
    WAITING = 1
    RUNNING = 2
    FINISHED = 3


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are OpenAI's where it has one. TIMEOUT: its deadline passed."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


class WaitReason(enum.StrEnum):
    """Why a waiting request was not admitted.

    SEATS: max_num_seqs are running, or a static batch has its static_batch_size. MEMORY: too few free blocks; for a
    static batch, with all members at their worst. SIBLING_PREFILL: it will share the blocks of a sibling whose prompt
    is not computed yet. PENDING_TOKEN: it was preempted and its last token is still on its way from the device.
    PREEMPTION: a running request was preempted in this step, so nobody is admitted. BATCH: it came, or came to the head
    of the queue, when a static batch was closed already. Whoever was refused when the batch closed keeps that reason
    while it runs. FAIRNESS: it is another tenant's turn, which had less service; the head of the queue, who is that
    tenant's, has the reason why nobody is admitted.
    """

    SEATS = "seats"
    MEMORY = "memory"
    SIBLING_PREFILL = "sibling_prefill"
    PENDING_TOKEN = "pending_token"
    PREEMPTION = "preemption"
    BATCH = "batch"
    FAIRNESS = "fairness"


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence on its way through the engine. Owns its tokens and its progress, nothing else.

    Args:
        request_id: unique among the unfinished.
        prompt_token_ids: at least one token.
        sampling_params: `n` must be 1 here; siblings are requests of their own with the same `leader_id`.
        max_tokens: output tokens at most, resolved.
        stop_token_ids: tokens that end it, EOS included unless ignored.
        arrival_time: seconds of the engine's clock.
        priority: smaller goes first under the priority policy.
        leader_id: the sibling whose prefill this request waits for, if any.
        output_len: how many output tokens there will be, if that is known beforehand (a forced length).
        tenant: whom it is served for; the fair policy shares the engine between tenants.
        cache_salt: KV blocks are shared only between requests of the same salt.
        deadline: seconds of the engine's clock after which nobody wants it any more.
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

    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    num_pending_tokens: int = field(default=0, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    max_total_tokens: int = field(init=False)
    end_total_tokens: int = field(init=False)
    num_slots: int = field(default=0, init=False)

    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_token_id: int | None = field(default=None, init=False)
    arrival_index: int = field(default=-1, init=False)
    first_scheduled_time: float | None = field(default=None, init=False)
    first_token_time: float | None = field(default=None, init=False)
    done_time: float | None = field(default=None, init=False)

    wait_reason: WaitReason | None = field(default=None, init=False)
    wait_mark: dict[str, int] = field(default_factory=dict, init=False)
    steps_waited: dict[str, int] = field(default_factory=dict, init=False)
    num_preemptions: int = field(default=0, init=False)
    recompute_until: int = field(default=0, init=False)
    num_recomputed_tokens: int = field(default=0, init=False)
    num_padding_tokens: int = field(default=0, init=False)
    hold_moment: float = field(default=0.0, init=False)
    write_moment: float = field(default=0.0, init=False)
    kv_slot_seconds_held: float = field(default=0.0, init=False)
    kv_slot_seconds_used: float = field(default=0.0, init=False)

    def __post_init__(self, prompt_token_ids: list[int], max_tokens: int) -> None:
        assert prompt_token_ids, "a request has at least one prompt token"
        assert self.sampling_params.n == 1, "siblings are requests of their own"
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
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def count_recomputed(self, start: int, end: int) -> int:
        """Count the tokens of `start` to `end - 1` that are recomputed after a preemption; returns their number."""
        num_recomputed = max(0, min(end, self.recompute_until) - start)
        self.num_recomputed_tokens += num_recomputed
        return num_recomputed

    def append_sampled(self, tokens: list[int]) -> list[int]:
        """Append the value of the oldest pending token, and tokens beyond it if a step sampled several.

        Returns the appended tokens: up to the first stop token, which is kept, or to the length limit.
        """
        if len(tokens) > 1 or tokens[0] in self.stop_token_ids:
            tokens = self._until_stop(tokens)
        self.token_ids += tokens
        self.num_pending_tokens -= 1
        self.num_tokens = len(self.token_ids) + self.num_pending_tokens
        return tokens

    def _until_stop(self, tokens: list[int]) -> list[int]:
        tokens = tokens[: self.end_total_tokens - len(self.token_ids)]
        for index, token in enumerate(tokens):
            if token in self.stop_token_ids:
                self.stop_token_id = token
                return tokens[: index + 1]
        return tokens

    def drop_pending(self) -> None:
        """Remove the oldest pending token, which never gets a value."""
        self.num_pending_tokens -= 1
        self.num_tokens -= 1

    def start_holding(self, now: float) -> None:
        """Start to count slot-seconds of the slots that were allocated."""
        self.hold_moment = self.num_slots * now
        self.write_moment = self.num_computed_tokens * now

    def stop_holding(self, now: float) -> None:
        """Add the slot-seconds of the slots that are about to be freed."""
        used_until = now if self.done_time is None else self.done_time
        self.kv_slot_seconds_held += self.num_slots * now - self.hold_moment
        self.kv_slot_seconds_used += self.num_computed_tokens * used_until - self.write_moment

    def new_request(self, block_ids: list[int]) -> NewRequest:
        """What the executor receives when the request joins the batch, with a copy of its block table."""
        return NewRequest(
            request_id=self.request_id,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=block_ids,
            sampling_params=self.sampling_params,
            seed=self.seed,
            stop_token_ids=sorted(self.stop_token_ids),
        )

    def timeout_output(self) -> EngineCoreOutput:
        """The last output of a request whose deadline has passed."""
        assert self.deadline is not None
        seconds = round(self.deadline - self.arrival_time, 3)
        if seconds > 0:
            problem = f"the timeout of {seconds:g} s passed when {self.num_output_tokens} output tokens were computed"
        else:
            problem = "the timeout passed before the request reached the engine"
        return EngineCoreOutput(
            self.request_id,
            [],
            finish_reason=FinishReason.TIMEOUT.value,
            num_preemptions=self.num_preemptions,
            error=f"{problem}: allow more time, or ask for fewer tokens",
            error_param="timeout",
        )

    def final_output(self, output: EngineCoreOutput, now: float) -> EngineCoreOutput:
        """The output with all that is set in the last one of a request that finishes at `now`."""
        assert self.finish_reason is not None
        return output._replace(
            finish_reason=self.finish_reason.value,
            stop_token_id=self.stop_token_id,
            times=self.times(finished=now),
            stats=self._stats(),
        )

    def times(self, finished: float | None = None) -> RequestTimes:
        return RequestTimes(self.arrival_time, self.first_scheduled_time, self.first_token_time, finished)

    def _stats(self) -> RequestStats:
        return RequestStats(
            steps_waited=self.steps_waited,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_padding_tokens=self.num_padding_tokens,
            kv_slot_seconds_held=self.kv_slot_seconds_held,
            kv_slot_seconds_used=self.kv_slot_seconds_used,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, computed {self.num_computed_tokens}/{self.num_tokens}, "
            f"prompt {self.num_prompt_tokens}, max {self.max_total_tokens})"
        )
