"""The events of an engine: one for each change of a request and one for each step, and the reader of their log.

Metrics, figures, traces and tests are derived from events alone. An event is built only if there is a sink for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, get_args

from chairlift.errors import ConfigError
from chairlift.outputs import PrefixMatch

SCHEMA_VERSION = 4

SLOT_KINDS: Final = ("token_states", "reserved", "internal", "external", "free")
"""The kinds of slots, fields of `Step` with their numbers, which `core.measuring.accounting` defines."""


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """The first event of a log, with the limits that apply to all later events.

    Attributes:
        static_batch_size, static_run_to: None unless `batching` is "static".
        kv_arena: the allocator of reservations; None if `kv` is not a reservation policy.
        kernels: "native", "triton" or "torch"; "" in a simulation.
        kv_cache_dtype: the data type of K and V; "" in a simulation.
        quantization: the configured format of the weights; None leaves them as in the file.
        weight_bytes: bytes of weights that each step reads from memory; 0 in a simulation. If the model has experts, a
            step with few tokens reads a part of them.
        kv_bytes_per_slot: bytes of K and V of one token in all layers; 0 in a simulation.
        kv_bytes_per_block: bytes of a block, which has the slots of one group of layers; 0 in a simulation.
        kv_windows: the sliding window of each group of layers with separate block tables; None for layers that attend
            to all tokens. A slot is the memory of one token in the layers of one group.
        state_bytes: bytes of the recurrent state of one sequence; 0 if the model has none.
        num_checkpoints, checkpoint_interval: the number of recurrent states that can be kept for prefixes, and the
            tokens between two of them in a long sequence.
        num_swap_blocks: the number of blocks of the swap space; 0 if preempted requests are recomputed.
        step_time: the fields of the first `StepTime`, which limits chunks of prompts; None if there is none.
        speculative_config: the fields of the `SpeculativeConfig`; None without speculative decoding.
        row_time: measured seconds of a step as pairs of rows and seconds (see `RowTime`); None if they were not
            measured.
    """

    type: ClassVar[str] = "engine_started"
    time: float
    model: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    scheduling_policy: str
    kv: str
    enable_prefix_caching: bool
    length_predictor: str = "none"
    pacing_tokens_per_second: float | None = None
    batching: str = "continuous"
    static_batch_size: int | None = None
    static_run_to: str | None = None
    kv_arena: str | None = None
    kernels: str = ""
    kv_cache_dtype: str = ""
    quantization: str | None = None
    weight_bytes: int = 0
    kv_bytes_per_slot: int = 0
    kv_bytes_per_block: int = 0
    kv_windows: list[int | None] = field(default_factory=lambda: [None])
    state_bytes: int = 0
    num_checkpoints: int = 0
    checkpoint_interval: int = 0
    num_swap_blocks: int = 0
    step_time: Mapping[str, float] | None = None
    speculative_config: Mapping[str, Any] | None = None
    row_time: list[list[float]] | None = None
    schema_version: int = SCHEMA_VERSION

    def num_blocks_of_all_layers(self, num_blocks: int) -> int:
        """The number of blocks of all layers that take the memory of `num_blocks` blocks of one group."""
        if not self.kv_bytes_per_block:
            return num_blocks // len(self.kv_windows)
        return num_blocks * self.kv_bytes_per_block // (self.kv_bytes_per_slot * self.block_size)


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request was added to the queue, or is parked until its leader has computed the shared prompt.

    Attributes:
        output_len: the number of output tokens, if it is forced.
        predicted_len: the number that the length predictor expects; None without a prediction.
        tenant: the unit of fair scheduling that the request belongs to.
        slo: the fields of the `SLO` of the request; None if it has none.
        is_streamed: the answer is read while it is generated.
        tools_start: about the position of the tools in the prompt, in tokens; None if it has none.
        step: the first step that can contain the request.
    """

    type: ClassVar[str] = "request_arrived"
    time: float
    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int = 0
    leader_id: str | None = None
    output_len: int | None = None
    predicted_len: int | None = None
    tenant: str = ""
    slo: Mapping[str, float | None] | None = None
    step: int = 0
    is_streamed: bool = True
    tools_start: int | None = None


@dataclass(frozen=True, slots=True)
class RequestQueued:
    """A parked request was added to the queue; `step` is the first step that can contain it."""

    type: ClassVar[str] = "request_queued"
    time: float
    request_id: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatched(PrefixMatch):
    """A request was admitted for the first time, and its prompt was searched in the prefix cache. The event precedes
    that of the step."""

    type: ClassVar[str] = "prefix_matched"
    time: float
    request_id: str


@dataclass(frozen=True, slots=True)
class RequestRejected:
    """A request was rejected because it exceeds a limit of the engine; `message` has the numbers."""

    type: ClassVar[str] = "request_rejected"
    time: float
    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestWaiting:
    """The head of the queue was not admitted, for another reason than in the previous step.

    For a static batch, all counts assume the worst case: every member has its maximum length. For a request that
    waits for the prompt of its leader, the four counts of blocks are 0.

    Attributes:
        reason: a `WaitReason`.
        needed_blocks: blocks that the request needs.
        free_blocks: free blocks of the pool; evictable_blocks: those of them that hold cached prefixes.
        largest_free_piece: the largest number of contiguous free blocks; all free blocks with paged memory.
        step: the first step that does not contain the request for this reason.
    """

    type: ClassVar[str] = "request_waiting"
    time: float
    request_id: str
    reason: str
    needed_blocks: int
    free_blocks: int
    evictable_blocks: int
    largest_free_piece: int
    num_running: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step.

    The lists `request_ids`, `num_scheduled`, `num_computed`, `num_new`, `num_padding` and `num_draft` are columns:
    entry i of each belongs to the same request.

    Attributes:
        time: when the result was known; scheduled_time: when the step was scheduled.
        num_scheduled: tokens computed; num_computed: tokens that had K and V before the step; num_new: tokens sampled.
        num_padding: padding tokens computed for a static batch; empty if there are none.
        num_draft: draft tokens verified, which `num_scheduled` includes; `num_new` - 1 of them were accepted. Empty if
            there are none.
        num_recomputed: scheduled tokens that had K and V before a preemption.
        admitted, preempted: requests that the schedule of this step admitted or preempted.
        displaced: the preempted requests whose seat the scheduling policy gave to another request, and that request.
        swapped: the preempted requests whose K and V are kept in the swap space, so that nothing is recomputed.
        blocks_swapped_out, blocks_swapped_in: blocks that were copied to and from the swap space before the step.
        swap_blocks: blocks of the swap space in use after the schedule.
        finished: requests that ended with the result of this step.
        new_blocks: ids of the blocks that each request received; all of its blocks when it is admitted.
        released_blocks: ids of the blocks that each request released because they left the windows of their layers, or
            because a beam continues another one.
        num_running, num_waiting, free_blocks, evictable_blocks: counts after the schedule.
        token_states, reserved, internal, external, free: slots of the pool by kind (SLOT_KINDS) after the schedule.
            `max_tokens` separates reserved from internal slots.
        shared: slots that several requests hold.
        saved: slots that these requests would hold in addition if they did not share.
        num_matched: the number of tokens of an admitted request of which others have K and V, if its recurrent state is
            known for fewer. `num_computed` is the position of the checkpoint that it continues.
        num_checkpoints: checkpoints of recurrent states in use after the schedule; evicted_checkpoints: those that were
            evicted since the step before.
        wait_reason: why the head of the queue, `head_id`, was not admitted; None if the queue is empty.
    """

    type: ClassVar[str] = "step"
    time: float
    step: int
    scheduled_time: float
    request_ids: list[str]
    num_scheduled: list[int]
    num_computed: list[int]
    num_new: list[int]
    admitted: list[str]
    preempted: list[str]
    finished: list[str]
    num_running: int
    num_waiting: int
    free_blocks: int
    evictable_blocks: int
    displaced: dict[str, str] = field(default_factory=dict)
    num_padding: list[int] = field(default_factory=list)
    num_draft: list[int] = field(default_factory=list)
    num_recomputed: int = 0
    new_blocks: dict[str, list[int]] = field(default_factory=dict)
    released_blocks: dict[str, list[int]] = field(default_factory=dict)
    token_states: int = 0
    reserved: int = 0
    internal: int = 0
    external: int = 0
    free: int = 0
    shared: int = 0
    saved: int = 0
    num_matched: dict[str, int] = field(default_factory=dict)
    num_checkpoints: int = 0
    evicted_checkpoints: int = 0
    wait_reason: str | None = None
    head_id: str | None = None
    swapped: list[str] = field(default_factory=list)
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    swap_blocks: int = 0

    @property
    def num_kept(self) -> list[int]:
        """`num_scheduled` without rejected draft tokens: the tokens whose K and V remain valid."""
        if not self.num_draft:
            return self.num_scheduled
        return [count - rejected for count, rejected in zip(self.num_scheduled, self.num_rejected, strict=True)]

    @property
    def num_rejected(self) -> list[int]:
        """The draft tokens that were rejected, in the order of the columns; empty if there are no draft tokens."""
        columns = zip(self.num_draft, self.num_new, strict=False)
        return [max(0, drafts + 1 - new) if drafts else 0 for drafts, new in columns]

    @property
    def num_accepted(self) -> int:
        """The number of draft tokens that were accepted."""
        return sum(self.num_draft) - sum(self.num_rejected)


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request ended. In a static batch it ends together with the batch.

    Attributes:
        first_scheduled_time, first_token_time: None if the request was never scheduled, or has no output token.
        steps_waited: reason (a `WaitReason`) -> number of steps that were scheduled while the request waited.
        num_recomputed_tokens, num_padding_tokens, kv_slot_seconds_held, kv_slot_seconds_used: see `RequestStats`.
        step: the first step that was scheduled after the end of the request.
    """

    type: ClassVar[str] = "request_finished"
    time: float
    request_id: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    steps_waited: dict[str, int] = field(default_factory=dict)
    num_recomputed_tokens: int = 0
    num_padding_tokens: int = 0
    kv_slot_seconds_held: float = 0.0
    kv_slot_seconds_used: float = 0.0
    step: int = 0


@dataclass(frozen=True, slots=True)
class PrefixCacheChanged:
    """Blocks entered or left the index of the prefix cache, at most once per step. It is emitted only with
    `enable_kv_cache_events`.

    Attributes:
        stored, removed: keys of blocks (see `core.kv.index_changes.block_key`).
    """

    type: ClassVar[str] = "prefix_cache_changed"
    time: float
    stored: list[int]
    removed: list[int]


@dataclass(frozen=True, slots=True)
class StepTimeChanged:
    """The estimated time of steps has become shorter, because steps took less time than estimated.

    Attributes:
        step: the first step that is planned with the new estimate.
        step_time: its fields, as in `EngineStarted`.
    """

    type: ClassVar[str] = "step_time_changed"
    time: float
    step: int
    step_time: Mapping[str, float]


RequestEvent = RequestArrived | RequestQueued | PrefixMatched | RequestRejected | RequestWaiting | RequestFinished
EngineEvent = EngineStarted | StepTimeChanged
Event = EngineEvent | RequestEvent | Step | PrefixCacheChanged
DroppableEvent = Step | RequestWaiting
"""Events that may be dropped for a slow listener. The other events determine which requests exist, and there are only a
few for each request."""

EVENT_TYPES: dict[str, type[Event]] = {kind.type: kind for kind in get_args(Event)}


class EventSink(Protocol):
    """A receiver of events. `emit` is called on the thread of the step loop and must not block."""

    def emit(self, event: Event) -> None: ...


@dataclass(slots=True)
class EventList:
    """An event sink that keeps all events in memory."""

    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)


class EventBroadcaster:
    """An event sink that passes every event to several sinks, in their order."""

    def __init__(self, *sinks: EventSink) -> None:
        self._sinks = sinks

    def emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink.emit(event)


def from_json(line: str | bytes) -> Event:
    """The event of a JSON line.

    Raises:
        ValueError: the line is not JSON, or has an unknown type, or fields are missing or unknown.
    """
    record: Any = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"an event must be a JSON object, got {line[:80]!r}")
    kind = EVENT_TYPES.get(record.pop("type", ""))
    if kind is None:
        raise ValueError(f"type must be one of {', '.join(EVENT_TYPES)}, got {line[:80]!r}")
    known = {f.name for f in fields(kind)}
    if unknown := set(record) - known:
        raise ValueError(f"event {kind.type} has unknown fields {sorted(unknown)}")
    try:
        return kind(**record)
    except TypeError as error:
        raise ValueError(f"event {kind.type}: {error}") from None


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log file, in order.

    Raises:
        ConfigError: the file cannot be read, or a line is not an event; the message has its number.
    """
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):  # noqa: B007 - used in messages
                yield from_json(line)
    except OSError as error:
        raise ConfigError(f"event log {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"not an event log: {path}, line {number + 1}: not UTF-8") from None
    except ValueError as error:
        raise ConfigError(f"not an event log: {path}, line {number}: {error}") from None
