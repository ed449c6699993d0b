"""The records that the parts of the engine exchange. They contain plain values and each other, so that they can be sent
to another process.

Scheduler --SchedulerOutput--> Executor --ModelRunnerOutput--> Scheduler --EngineCoreOutput--> front end
                                                               front end --RequestOutput--> user
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from chairlift.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that joins the batch of the executor: when it is admitted, and again after each preemption.

    Attributes:
        token_ids: all known tokens, the prompt first.
        num_prompt_tokens: the number of them that belong to the prompt.
        num_computed_tokens: the number of them that have K and V in `block_ids`: a hit in the prefix cache, or those
            that this step swaps in.
        block_ids: the block table for each group of layers; -1 for blocks that no later query reads.
        seed: the seed of the random stream of the request.
        stop_token_ids: tokens that end the output, including EOS unless it is ignored; masked below min_tokens.
        lora_id: the LoRA adapter of the request; 0 for none.
        checkpoint: the checkpoint with the recurrent state after the computed tokens; None if none are computed, or the
            model has no recurrent layers.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[list[int]]
    sampling_params: SamplingParams
    seed: int
    stop_token_ids: Collection[int]
    lora_id: int = 0
    checkpoint: int | None = None


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The input of one step of the executor, as changes to the previous step.

    Attributes:
        step: the number of the step, which increases by one.
        num_scheduled_tokens: request id -> number of tokens to compute, in batch order. If all tokens of a request are
            computed after the step, its next token is sampled. 0 only where there is padding.
        new_requests: requests that join the batch in this step; all of them are scheduled.
        new_block_ids: request id -> blocks to append to its table for each group, after `new_requests` have joined.
        removed: requests that finished or were aborted or preempted since the previous step; they are removed first.
        num_padding_tokens: request id -> number of padding tokens to compute before its tokens, in static batches.
            Their slot is -1, so no K and V are written.
        draft_token_ids: request id -> proposed next tokens, which are computed after its known tokens and included in
            `num_scheduled_tokens`. A token is sampled after the last known token and after each draft token that
            equals the token sampled before it.
        num_draft_tokens: request id -> number of draft tokens that the draft model of the executor proposes in this
            step; otherwise as `draft_token_ids`.
        num_draft_reads: request id -> number of tokens that the draft model computes, so that it can propose later.
        checkpoints: request id -> (position, checkpoint) in ascending order: the recurrent state after so many tokens
            of the request, which this step computes, is written to the checkpoint as well.
        beams: request id -> (parent, token): the beam continues the known tokens of its parent, which may be itself,
            with this token in place of the one that was sampled. Both share the full blocks of computed tokens.
        swapped_out: block of the swap space -> block of the pool that is copied to it, before anything else is copied.
        copied_blocks: block of the pool -> block of the pool that is copied to it, after `swapped_out`.
        swapped_in: block of the pool -> block of the swap space that is copied to it, after `copied_blocks`.
    """

    step: int
    num_scheduled_tokens: dict[str, int]
    new_requests: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, list[list[int]]] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    num_padding_tokens: dict[str, int] = field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    num_draft_tokens: dict[str, int] = field(default_factory=dict)
    num_draft_reads: dict[str, int] = field(default_factory=dict)
    checkpoints: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    beams: dict[str, tuple[str, int]] = field(default_factory=dict)
    copied_blocks: dict[int, int] = field(default_factory=dict)
    swapped_out: dict[int, int] = field(default_factory=dict)
    swapped_in: dict[int, int] = field(default_factory=dict)

    def num_drafts(self, request_id: str) -> int:
        """The number of draft tokens of a request."""
        return self.num_draft_tokens.get(request_id) or len(self.draft_token_ids.get(request_id, ()))


class Logprob(NamedTuple):
    """A token with its log-probability and rank; rank 1 is the most likely token."""

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(NamedTuple):
    """The logprobs at one position: of its token, and of the most likely tokens in descending order."""

    token: Logprob
    top: list[Logprob]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of one step of the executor.

    Attributes:
        step: the number of the `SchedulerOutput`.
        token_ids: request id -> new tokens, for requests whose known tokens are all computed: one, and one more for
            each accepted draft token.
        logprobs: request id -> one entry for each new token, for requests with `logprobs`.
        prompt_logprobs: request id -> (position of the first entry, one entry for each prompt token), for requests with
            `prompt_logprobs`.
        errors: request id -> error that ends the request; its token is not valid.
        pooled: request id -> vector or score (float32), for requests of a model that generates no tokens.
    """

    step: int
    token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    pooled: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """The times of a request, in seconds of the engine's clock; None until the event has happened."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the schedule of the first step."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival


@dataclass(frozen=True, slots=True)
class RequestStats:
    """The waits and the cost of a request.

    Attributes:
        steps_waited: reason (a `WaitReason`) -> number of steps that were scheduled while the request waited. A request
            behind the head of the queue has the reason of the head.
        num_recomputed_tokens: tokens that were computed again after a preemption.
        num_padding_tokens: padding tokens that were computed for the request in a static batch.
        kv_slot_seconds_held: held KV slots times seconds. A shared slot counts for each holder.
        kv_slot_seconds_used: the part of it for slots that were written and that the request still needed.
    """

    steps_waited: dict[str, int]
    num_recomputed_tokens: int
    num_padding_tokens: int
    kv_slot_seconds_held: float
    kv_slot_seconds_used: float

    @classmethod
    def total(cls, parts: Sequence[RequestStats]) -> RequestStats:
        """The sum over all answers to a prompt."""
        steps_waited: Counter[str] = Counter()
        for part in parts:
            steps_waited.update(part.steps_waited)
        names = ("num_recomputed_tokens", "num_padding_tokens", "kv_slot_seconds_held", "kv_slot_seconds_used")
        return cls(dict(steps_waited), *(sum(getattr(part, name) for part in parts) for name in names))


class MissReason(enum.StrEnum):
    """Why the prefix cache did not have the first block of a prompt that it could have had.

    NEVER_SEEN: no recent prompt of the caller has the text.
    DIFFERS: an earlier prompt of the caller has another token before the same text.
    EVICTED: the block was evicted. IN_PROGRESS: a running request is computing it.
    OTHER_ADAPTER, OTHER_SALT: the text is known with another LoRA adapter, or another `cache_salt` or caller.
    CHECKPOINT_MISSING: its K and V are there, but not the recurrent state, or not those of layers with a window.
    PROMPT_LOGPROBS: the request needs the logits of the whole prompt.
    """

    NEVER_SEEN = "never_seen"
    DIFFERS = "differs"
    EVICTED = "evicted"
    IN_PROGRESS = "in_progress"
    OTHER_ADAPTER = "other_adapter"
    OTHER_SALT = "other_salt"
    CHECKPOINT_MISSING = "checkpoint_missing"
    PROMPT_LOGPROBS = "prompt_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """What the prefix cache had of a prompt, in tokens, and why not more.

    Attributes:
        num_memory_tokens, num_disk_tokens: tokens that were found in KV memory, and those that were loaded.
        reason: a `MissReason`; None if all blocks were found.
        is_own: the reason tells nothing of the requests of other callers.
        position: the first token that differs.
        num_repeated_tokens: about how many of the missing tokens the other prompt has, too.
        num_moved_tokens: by how many tokens they have moved to the front: 0 if text was replaced, and a positive number
            if text was removed.
        other_id: the request that evicted the block, or that has the other prompt.
        evicted_time, idle_seconds: when the block was evicted, and how long it had not been used.
    """

    num_memory_tokens: int = 0
    num_disk_tokens: int = 0
    reason: str | None = None
    is_own: bool = True
    position: int | None = None
    num_repeated_tokens: int = 0
    num_moved_tokens: int = 0
    other_id: str | None = None
    evicted_time: float | None = None
    idle_seconds: float | None = None

    def for_caller(self) -> Self:
        """What the caller may know, which is nothing of the requests of others."""
        known = replace(self, other_id=None, evicted_time=None)
        if self.is_own:
            return known
        return replace(known, reason=MissReason.NEVER_SEEN, is_own=True, num_repeated_tokens=0, idle_seconds=None)


class EngineCoreOutput(NamedTuple):
    """The result of one step for one request. It is a named tuple because each step creates one for each request.

    Attributes:
        finish_reason, stats: set in the last output only.
        num_cached_tokens, prefix: set in the first output with a token.
        times: set in the first output with a token and in the last output.
        num_preemptions: the number of preemptions so far.
        error: why the request was rejected or failed; `error_param` is the field that caused it.
        pooled: the vector or score of a request that generates no tokens.
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
    pooled: bytes | None = None
    prefix: PrefixMatch | None = None


def attach_prompt_logprobs(
    outputs: list[EngineCoreOutput], prompt_logprobs: dict[str, tuple[int, list[TokenLogprobs]]]
) -> list[EngineCoreOutput]:
    """The outputs with prompt logprobs added by request id; a request without an output gets one without tokens."""
    pending = dict(prompt_logprobs)
    outputs = [o._replace(prompt_logprobs=pending.pop(o.request_id, None)) for o in outputs]
    return outputs + [EngineCoreOutput(rid, [], prompt_logprobs=entry) for rid, entry in pending.items()]


def join_outputs(request_id: str, parts: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """The output of a request that consists of these parts; an empty output if there are none.

    The chunks of its prompt logprobs must follow one another. A part that does not reach the end of the prompt has
    neither a token nor the logprobs of one.
    """
    logprobs = [entry for part in parts for entry in part.logprobs or ()]
    chunks = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
    return EngineCoreOutput(
        request_id,
        [token for part in parts for token in part.new_token_ids],
        logprobs=logprobs or None,
        prompt_logprobs=(chunks[0][0], [entry for _, chunk in chunks for entry in chunk]) if chunks else None,
        num_cached_tokens=max((part.num_cached_tokens for part in parts), default=0),
        prefix=next((part.prefix for part in parts if part.prefix is not None), None),
    )


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt. In a stream `text`, `token_ids` and `logprobs` contain only new content.

    Attributes:
        cumulative_logprob: the sum of the logprobs of all tokens so far, if the request has `logprobs`.
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
    """A request with its answers, in the order of their index.

    Attributes:
        times: the times of the answer that ended last; None until an answer has ended.
        stats: the sum over the answers that have ended, except those that a stop string ended; None until there is one.
        pooled: the vector (float32) of a text, or the score of a pair of texts; None if the model generates text.
        prefix: what the prefix cache had of the prompt, and why not more; None without a prefix cache.
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
    pooled: bytes | None = None
    prefix: PrefixMatch | None = None
