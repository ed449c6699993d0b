"""SchedulerMeter: counts for each request what the scheduler does, and emits the events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from chairlift.core.kv.block_tables import held_blocks
from chairlift.core.kv.kv_cache_manager import KVCacheManager, MemoryDemand, TableChange
from chairlift.core.measuring.accounting import num_written_slots, slot_usage
from chairlift.core.measuring.request_meter import RequestMeter
from chairlift.core.measuring.scheduler_observer import SchedulerObserver
from chairlift.core.measuring.wait_log import WaitLog
from chairlift.core.step_time_correction import StepTimeCorrection
from chairlift.errors import RequestError
from chairlift.events import (
    EventSink,
    PrefixCacheChanged,
    PrefixMatched,
    RequestArrived,
    RequestFinished,
    RequestQueued,
    RequestRejected,
    Step,
    StepTimeChanged,
)
from chairlift.outputs import ModelRunnerOutput, SchedulerOutput
from chairlift.request import Request, RequestStatus, WaitReason


def _new_blocks(output: SchedulerOutput, forked: dict[str, list[int]]) -> dict[str, list[int]]:
    """The blocks that each request receives in the step, in all groups of layers, and before it by a fork."""
    blocks = forked | {new.request_id: held_blocks(new.block_ids) for new in output.new_requests}
    for request_id, added in output.new_block_ids.items():
        blocks[request_id] = blocks.get(request_id, []) + held_blocks(added)
    return blocks


UNKNOWN_DEMAND: Final = MemoryDemand(0, 0, 0, 0)


class SchedulerMeter(SchedulerObserver):
    """Counts for each request, and emits the events.

    Args:
        events: receives what happens; without it no event is built.
        is_fair: the queue gives turns to tenants.

    Attributes:
        blocked: the last head of the queue that was blocked, and why. It is blocked in the step that is planned if it
            still waits then.
        preempted: ids of requests whose preemption the next planned step reports; swapped: those of them whose K and V
            are in the swap space.
        correction: shortens the estimated time of steps; None if there is no estimate.
    """

    def __init__(
        self, kv_cache_manager: KVCacheManager, events: EventSink | None = None, is_fair: bool = False
    ) -> None:
        self._kv = kv_cache_manager
        self._events = events
        self._waits = WaitLog(kv_cache_manager, events, is_fair)
        self._num_groups = len(kv_cache_manager.windows)
        self._num_unfinished = 0
        self._running: dict[str, Request] = {}
        self._released: dict[str, list[int]] = {}
        self._forked: dict[str, list[int]] = {}
        self._matched: dict[str, int] = {}
        self._displaced: dict[str, str] = {}
        self._num_evicted = 0
        self._recomputing: dict[str, Request] = {}
        self._steps: deque[tuple[SchedulerOutput, dict[str, list[int]], dict[str, Any]]] = deque()
        self.blocked: tuple[Request, WaitReason] | None = None
        self.correction: StepTimeCorrection | None = None
        self.preempted: list[str] = []
        self.swapped: list[str] = []

    # -- arrival and queue ---------------------------------------------------------------------------------------

    def record_rejection(self, request: Request, error: RequestError) -> None:
        if self._events is not None:
            self._events.emit(RequestRejected(request.arrival_time, request.request_id, str(error)))

    def record_queued(self, request: Request, now: float) -> None:
        wait_mark = request.meter.wait_mark
        if wait_mark is None:
            self._num_unfinished += 1
            self._emit_arrival(request)
        elif WaitReason.SIBLING_PREFILL.value in wait_mark:
            self._waits.stop(request)
            if self._events is not None:
                self._events.emit(RequestQueued(now, request.request_id, self._waits.num_steps))
        self._waits.start(request)
        if request.status is RequestStatus.PARKED:
            # What it needs is known when the prompt of its leader is computed.
            self._waits.record_reason(request, WaitReason.SIBLING_PREFILL, now, len(self._running), UNKNOWN_DEMAND)

    def _emit_arrival(self, request: Request) -> None:
        if self._events is None:
            return
        slo = request.sampling_params.slo
        self._events.emit(
            RequestArrived(
                time=request.arrival_time,
                request_id=request.request_id,
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_total_tokens - request.num_prompt_tokens,
                priority=request.priority,
                leader_id=request.leader_id,
                output_len=request.output_len,
                predicted_len=request.predicted_len,
                tenant=request.tenant,
                slo=None if slo is None else asdict(slo),
                step=self._waits.num_steps,
                is_streamed=request.sampling_params.is_streamed,
                tools_start=request.sampling_params.tools_start,
            )
        )

    def record_blocked(self, head: Request, reason: WaitReason, now: float, demand: MemoryDemand | None = None) -> None:
        self.blocked = head, reason
        self._waits.record_head(head, reason, now, len(self._running), demand)

    # -- running requests ----------------------------------------------------------------------------------------

    def record_admission(self, request: Request, now: float) -> None:
        self._waits.stop(request)
        self._running[request.request_id] = request
        meter: RequestMeter = request.meter
        meter.start_holding(self._kv.num_held_slots(request), num_written_slots(request, self._kv), now)
        if meter.recompute_until > request.num_computed_tokens:
            self._recomputing[request.request_id] = request
        if (num_matched := self._kv.prefixes.num_matched_tokens(request)) > request.num_computed_tokens:
            self._matched[request.request_id] = num_matched
        if meter.first_scheduled_time is None:
            meter.first_scheduled_time = now
            meter.num_cached_tokens = request.num_computed_tokens
            meter.prefix = self._kv.match_prefix(request)
            if meter.prefix is not None and self._events is not None:
                self._events.emit(PrefixMatched(time=now, request_id=request.request_id, **asdict(meter.prefix)))

    def record_table_change(self, request: Request, change: TableChange, now: float) -> None:
        meter, size, released = request.meter, self._kv.block_size, change.released
        if change.is_fork:
            held = self._forked[request.request_id] = held_blocks(change.added)
            moment = (len(held) - len(released)) * size * now
            meter.hold_moment += moment
            meter.write_moment += moment
        else:
            meter.hold_moment += sum(map(len, change.added)) * size * now
            if released:
                moment = len(released) * size * now
                meter.hold_moment -= moment
                meter.write_moment -= moment
        if released:
            self._released.setdefault(request.request_id, []).extend(released)

    def record_accepted_drafts(self, request: Request, count: int, scheduled_time: float) -> None:
        request.meter.write_moment += count * self._num_groups * scheduled_time

    def record_preemption(self, request: Request, is_swapped: bool, displacing: Request | None, now: float) -> None:
        request_id, meter = request.request_id, request.meter
        self._stop_running(request, now)
        meter.recompute_until = max(meter.recompute_until, request.num_computed_tokens)
        self.preempted.append(request_id)
        if is_swapped:
            self.swapped.append(request_id)
        if displacing is not None:
            self._displaced[request_id] = displacing.request_id

    def _stop_running(self, request: Request, now: float) -> None:
        """Count the slot-seconds of the memory that is about to be freed."""
        num_written = num_written_slots(request, self._kv)
        request.meter.stop_holding(self._kv.num_held_slots(request), num_written, now)
        for by_id in (self._running, self._released, self._forked, self._recomputing):
            by_id.pop(request.request_id, None)

    # -- steps ---------------------------------------------------------------------------------------------------

    def record_step(self, output: SchedulerOutput, requests: Sequence[Request], now: float) -> None:
        head, reason = self.blocked or (None, None)
        if head is not None and head.status is not RequestStatus.WAITING:
            head = reason = None  # It was blocked in an attempt that scheduled nothing.
        self._waits.count_step(reason, head)
        # This loop runs for each request and step, so it does nothing else.
        num_groups, counts = self._num_groups, output.num_scheduled_tokens.values()
        for request, count in zip(requests, counts):  # noqa: B905
            request.meter.write_moment += count * num_groups * now
        if self.correction is not None:
            self.correction.record_step(requests, counts, now)
        for request_id, count in output.num_padding_tokens.items():
            self._running[request_id].meter.num_padding_tokens += count
        num_recomputed = self._count_recomputed(output) if self._recomputing else 0
        if self._events is not None:
            memory = self._kv.counts()
            running = self._running.values()
            planned = {
                "scheduled_time": now,
                "num_computed": [r.num_computed_tokens - n for r, n in zip(requests, counts)],  # noqa: B905
                "num_recomputed": num_recomputed,
                "preempted": self.preempted,
                "displaced": self._displaced,
                "swapped": self.swapped,
                "released_blocks": self._released,
                "num_matched": self._matched,
                "wait_reason": None if reason is None else reason.value,
                "head_id": None if head is None else head.request_id,
                "num_running": len(running),
                "num_waiting": self._num_unfinished - len(running),
                "free_blocks": self._kv.num_free_blocks,
                "evictable_blocks": memory.num_evictable_blocks,
                "num_checkpoints": memory.num_checkpoints,
                "evicted_checkpoints": memory.num_evicted_checkpoints - self._num_evicted,
                "swap_blocks": memory.num_swap_blocks,
                **slot_usage(running, self._kv, reason)._asdict(),
            }
            self._num_evicted = memory.num_evicted_checkpoints
            self._steps.append((output, self._forked, planned))
        self.preempted, self.swapped, self._displaced = [], [], {}
        self._released, self._forked, self._matched = {}, {}, {}

    def _count_recomputed(self, output: SchedulerOutput) -> int:
        """Count the tokens of the step that are recomputed; returns their number."""
        total = 0
        for request_id, request in list(self._recomputing.items()):
            end, meter = request.num_computed_tokens, request.meter
            total += meter.count_recomputed(end - output.num_scheduled_tokens.get(request_id, 0), end)
            if end >= meter.recompute_until:
                del self._recomputing[request_id]
        return total

    def record_result(self, result: ModelRunnerOutput, finished: list[str], now: float) -> None:
        if self._events is not None:
            output, forked, planned = self._steps.popleft()
            scheduled, padding = output.num_scheduled_tokens, output.num_padding_tokens
            has_drafts = output.draft_token_ids or output.num_draft_tokens
            step = Step(
                time=now,
                finished=finished,
                step=output.step,
                request_ids=list(scheduled),
                num_scheduled=list(scheduled.values()),
                num_new=[len(result.token_ids.get(request_id, ())) for request_id in scheduled],
                admitted=[new.request_id for new in output.new_requests],
                blocks_swapped_out=len(output.swapped_out),
                blocks_swapped_in=len(output.swapped_in),
                num_padding=[padding.get(request_id, 0) for request_id in scheduled] if padding else [],
                num_draft=[output.num_drafts(request_id) for request_id in scheduled] if has_drafts else [],
                new_blocks=_new_blocks(output, forked),
                **planned,
            )
            self._events.emit(step)
            changes = self._kv.index_changes
            if changes is not None and (taken := changes.take()) is not None:
                self._events.emit(PrefixCacheChanged(now, *taken))
        shorter = None if self.correction is None else self.correction.record_result(now)
        if shorter is not None and self._events is not None:
            self._events.emit(StepTimeChanged(now, self._waits.num_steps, asdict(shorter)))

    def record_finish(self, request: Request, now: float) -> None:
        self._num_unfinished -= 1
        if request.status is RequestStatus.RUNNING:
            self._stop_running(request, now)
        else:
            self._waits.stop(request)
        if self._events is None:
            return
        assert request.finish_reason is not None
        meter: RequestMeter = request.meter
        self._events.emit(
            RequestFinished(
                time=now,
                request_id=request.request_id,
                finish_reason=request.finish_reason.value,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
                num_cached_tokens=meter.num_cached_tokens,
                num_preemptions=request.num_preemptions,
                arrival_time=request.arrival_time,
                first_scheduled_time=meter.first_scheduled_time,
                first_token_time=meter.first_token_time,
                **asdict(meter.stats()),
                step=self._waits.num_steps,
            )
        )
