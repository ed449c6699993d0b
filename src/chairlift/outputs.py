"""The records that cross a border: small, frozen, made of ints, floats, strings, lists and one another.

Scheduler --SchedulerOutput--> Executor --ModelRunnerOutput--> Scheduler --EngineCoreOutput--> front end
                                                               front end --RequestOutput--> user
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from chairlift.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """Introduces a request to the executor, once; again when it resumes after a preemption.

    Attributes:
        token_ids: every token known so far, the prompt first.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: how many already have K and V in `block_ids` (a prefix hit).
        block_ids: the block table so far, the blocks for this step included.
        seed: of the request's random stream.
        stop_token_ids: tokens that end it, EOS included unless ignored (masked below min_tokens).
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    stop_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What the executor has to do in one step. Carries deltas only.

    Attributes:
        step: counts up by one.
        num_scheduled_tokens: request id -> tokens to compute, in batch order. A request whose tokens are then all
            computed gets its next token sampled. 0 only where there is padding.
        new_requests: introduced in this step (all of them are scheduled in it).
        new_block_ids: blocks appended to the tables of requests introduced before.
        removed: requests that finished, were aborted or preempted since the last step: forget them first.
        num_padding_tokens: request id -> padding to compute before its tokens, with slot -1: nothing is written. Only
            static batches have any.
    """

    step: int
    num_scheduled_tokens: dict[str, int]
    new_requests: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    num_padding_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Without padding."""
        return sum(self.num_scheduled_tokens.values())

    @property
    def total_num_padding_tokens(self) -> int:
        return sum(self.num_padding_tokens.values())


class Logprob(NamedTuple):
    """One token and its log-probability; `rank` 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(NamedTuple):
    """The logprobs at one position: of the token that stands there, then of the likeliest ones in order."""

    token: Logprob
    top: list[Logprob]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What one step gave.

    Attributes:
        step: of the SchedulerOutput that this answers.
        token_ids: request id -> new tokens; requests that did not reach their last token are absent.
        logprobs: request id -> one entry a new token, for requests that asked.
        prompt_logprobs: request id -> (position of the first entry, one entry a prompt token); entry i describes
            the prompt token at position first + i.
        errors: request id -> why it cannot go on; its token means nothing.
    """

    step: int
    token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When things happened to a request, in seconds of the engine's clock; None: not yet."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a request waited for, and what it cost.

    Attributes:
        steps_waited: reason (see `request.WaitReason`) -> steps that began while it was not admitted for it; whoever
            stands behind the head of the queue waits for the head's reason.
        num_recomputed_tokens: computed again after a preemption.
        num_padding_tokens: computed for its row of a static batch, beside its own.
        kv_slot_seconds_held: slots that it held, summed over time; kv_slot_seconds_used: of those, written, and still
            needed by it. Shared slots count for every holder.
    """

    steps_waited: dict[str, int]
    num_recomputed_tokens: int
    num_padding_tokens: int
    kv_slot_seconds_held: float
    kv_slot_seconds_used: float

    @classmethod
    def total(cls, parts: Sequence[RequestStats]) -> RequestStats:
        """Of all answers to a prompt."""
        steps_waited: Counter[str] = Counter()
        for part in parts:
            steps_waited.update(part.steps_waited)
        return cls(
            dict(steps_waited),
            sum(part.num_recomputed_tokens for part in parts),
            sum(part.num_padding_tokens for part in parts),
            sum(part.kv_slot_seconds_held for part in parts),
            sum(part.kv_slot_seconds_used for part in parts),
        )


class EngineCoreOutput(NamedTuple):
    """What one step means for one request. A named tuple, because one is made for each of them in every step.

    Attributes:
        finish_reason: set in the last one only, and so is `stats`.
        num_cached_tokens: set in the first one with a token; `times` in that one and in the last.
        num_preemptions: so far.
        error: the request was refused, and `error_param` is the field to blame; there is no other output then.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: tuple[int, list[TokenLogprobs]] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    times: RequestTimes | None = None
    stats: RequestStats | None = None
    error: str | None = None
    error_param: str | None = None


def attach_prompt_logprobs(
    outputs: list[EngineCoreOutput], prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]]
) -> list[EngineCoreOutput]:
    """Attach prompt logprobs by request id. A chunk that sampled no token gets an output of its own."""
    pending = dict(prompt_logprobs)
    outputs = [o._replace(prompt_logprobs=pending.pop(o.request_id, None)) for o in outputs]
    return outputs + [EngineCoreOutput(rid, [], prompt_logprobs=entry) for rid, entry in pending.items()]


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt. In a stream `text`, `token_ids` and `logprobs` hold what is new since the last one.

    Attributes:
        cumulative_logprob: of all tokens so far, if logprobs were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers, by index.

    Attributes:
        times: of the answer that ended last; None until then.
        stats: summed over the answers that have ended, but for those that a stop string ended; None while there is
            none.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    times: RequestTimes | None = None
    stats: RequestStats | None = None
