"""The one schema of what happened: request events and one event a step, as JSON lines.

Metrics, plots, traces and tests read events; nothing else measures. An event is built only if somebody listens.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, get_args

from chairlift.request import Request
from chairlift.system.output_files import unwritable_file_error

logger = logging.getLogger("chairlift")

SCHEMA_VERSION = 4


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """The first event of a log: the limits under which everything after it happened.

    Attributes:
        static_batch_size, static_run_to: None unless `batching` is "static"; kv_arena: None where `kv` is "paged".
        kernels: "native", "torch" or "reference"; kv_cache_dtype: of K and V; quantization: as asked for; "" or None
            where no model computes.
        weight_bytes: read from memory by every step; kv_bytes_per_slot: K and V of one token in all layers; 0 where no
            model computes.
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
    batching: str = "continuous"
    static_batch_size: int | None = None
    static_run_to: str | None = None
    kv_arena: str | None = None
    kernels: str = ""
    kv_cache_dtype: str = ""
    quantization: str | None = None
    weight_bytes: int = 0
    kv_bytes_per_slot: int = 0
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request joined the queue (or waits for its leader's prefill). `output_len`: the true length, if forced;
    `tenant`: whom it is served for, and under the fair policy whose turn it takes; `step`: the first one that it can be
    in."""

    type: ClassVar[str] = "request_arrived"
    time: float
    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int = 0
    leader_id: str | None = None
    output_len: int | None = None
    tenant: str = ""
    step: int = 0

    @classmethod
    def from_request(cls, request: Request, step: int) -> RequestArrived:
        """The event of a request that arrives before the step is planned."""
        return cls(
            time=request.arrival_time,
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_total_tokens - request.num_prompt_tokens,
            priority=request.priority,
            leader_id=request.leader_id,
            output_len=request.output_len,
            tenant=request.tenant,
            step=step,
        )


@dataclass(frozen=True, slots=True)
class RequestQueued:
    """A request that waited for its leader's prefill joined the queue; `step`: the first one that it can be in."""

    type: ClassVar[str] = "request_queued"
    time: float
    request_id: str
    step: int


@dataclass(frozen=True, slots=True)
class RequestRejected:
    """A request that can never fit, refused at the door with the arithmetic."""

    type: ClassVar[str] = "request_rejected"
    time: float
    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestWaiting:
    """The head of the queue was not admitted, for another reason than in the step before.

    Blocks are counted: needed by the request, free in the pool, how many of the free ones are evictable (cached), and
    the largest piece of consecutive ones (of any ones, where blocks need not be consecutive).
    A request that was left out of a static batch needs its worst case, and free are the blocks that the members leave
    at their worst. `step` is the first one that it is left out of for this reason.
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
    """One step, emitted when its result is known. The columns `request_ids`, `num_scheduled`, `num_computed`, `num_new`
    and `num_padding` are parallel.

    Attributes:
        time: when its result was known; scheduled_time: when it was planned.
        num_scheduled: tokens computed; num_computed: tokens that had K and V before the step; num_new: tokens sampled.
        num_padding: padding computed besides, for a static batch; empty if there was none.
        num_recomputed: scheduled tokens that had K and V before a preemption.
        admitted, preempted: by the schedule of this step; finished: by its result.
        new_blocks: block ids that each request received; the whole table when it is admitted.
        num_running, num_waiting, free_blocks, evictable_blocks: after its schedule.
        token_states, reserved, internal, external, free: the pool's slots by kind after its schedule, see
            `core.kv.accounting`; reserved and internal are split by `max_tokens`.
        shared: slots that several requests hold; saved: slots that they would hold besides, had each its own.
        wait_reason: why the head of the queue, `head_id`, is not in it; None if nobody waits.
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
    num_padding: list[int] = field(default_factory=list)
    num_recomputed: int = 0
    new_blocks: dict[str, list[int]] = field(default_factory=dict)
    token_states: int = 0
    reserved: int = 0
    internal: int = 0
    external: int = 0
    free: int = 0
    shared: int = 0
    saved: int = 0
    wait_reason: str | None = None
    head_id: str | None = None


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request left; times are seconds of the engine's clock, None where it never got so far.

    Under static batching a request leaves with its batch, and gets all its tokens then. `steps_waited` counts, by
    reason (see `WaitReason`), the steps that began while it waited; `step` is the first one that was planned after it
    left; the other counts are those of `RequestStats`.
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

    @classmethod
    def from_request(cls, request: Request, now: float, step: int) -> RequestFinished:
        """The event of a request that leaves at `now`, before the step is planned."""
        assert request.finish_reason is not None
        return cls(
            time=now,
            request_id=request.request_id,
            finish_reason=request.finish_reason.value,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            arrival_time=request.arrival_time,
            first_scheduled_time=request.first_scheduled_time,
            first_token_time=request.first_token_time,
            steps_waited=request.steps_waited,
            num_recomputed_tokens=request.num_recomputed_tokens,
            num_padding_tokens=request.num_padding_tokens,
            kv_slot_seconds_held=request.kv_slot_seconds_held,
            kv_slot_seconds_used=request.kv_slot_seconds_used,
            step=step,
        )


Event = EngineStarted | RequestArrived | RequestQueued | RequestRejected | RequestWaiting | Step | RequestFinished
DroppableEvent = Step | RequestWaiting
"""What may be dropped for a listener that is too busy. The others say who is there and how it ended, a few for each
request that was sent: whoever misses one of them waits for a request that is gone."""

EVENT_TYPES: dict[str, type[Event]] = {kind.type: kind for kind in get_args(Event)}


class EventSink(Protocol):
    """Somebody who listens. Called on the step's thread: must not block."""

    def emit(self, event: Event) -> None: ...


@dataclass(slots=True)
class EventList:
    """Keeps events in memory."""

    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        self.events.append(event)


class EventBroadcaster:
    """Hands every event to several listeners, in their order."""

    def __init__(self, *sinks: EventSink) -> None:
        self._sinks = sinks

    def emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink.emit(event)


def to_json(event: Event) -> str:
    """One line, without the newline."""
    return json.dumps({"type": event.type, **asdict(event)}, separators=(",", ":"))


def from_json(line: str) -> Event:
    """The event of one line.

    Raises:
        ValueError: not JSON, an unknown type, or missing or unknown fields; says which.
    """
    record: Any = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"an event is a JSON object, got {line[:80]!r}")
    kind = EVENT_TYPES.get(record.pop("type", ""))
    if kind is None:
        raise ValueError(f"unknown event type in {line[:80]!r}; known are {', '.join(EVENT_TYPES)}")
    known = {f.name for f in fields(kind)}
    if unknown := set(record) - known:
        raise ValueError(f"event {kind.type} has unknown fields {sorted(unknown)}")
    try:
        return kind(**record)
    except TypeError as error:
        raise ValueError(f"event {kind.type}: {error}") from None


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log file, in order; raises ValueError naming the line that is not one."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield from_json(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None


class EventFile:
    """Writes events to a file as JSON lines, encoding and writing on a thread of its own.

    If the file cannot be written any more, later events are dropped and `error` says why: the engine goes on.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self.error: OSError | None = None
        self._thread = threading.Thread(target=self._write, name="chairlift-events", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        self._queue.put(event)

    def _write(self) -> None:
        while (event := self._queue.get()) is not None:
            if self.error is not None:
                continue
            try:
                self._file.write(to_json(event) + "\n")
                if self._queue.empty():
                    self._file.flush()
            except OSError as error:
                self._cut_short(error)

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._queue.put(None)
        self._thread.join()
        try:
            self._file.close()
        except OSError as error:
            self._cut_short(error)

    def _cut_short(self, error: OSError) -> None:
        if self.error is None:
            self.error = error
            logger.warning("the event log %s is cut short: %s", self._file.name, error)


def open_event_log(path: Path | None) -> EventFile | None:
    """The file of the option `event_log`, if it is given; raises ConfigError if it cannot be written."""
    if path is None:
        return None
    try:
        return EventFile(path)
    except OSError as error:
        raise unwritable_file_error("event_log", path, error) from None
