"""SchedulerMeter: observes a scheduler, counts for each request, and emits the events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from chairlift.core.kv.block_tables import held_blocks
from chairlift.core.kv.kv_cache_manager import KVCacheManager, MemoryDemand, TableChange
from chairlift.core.measuring.accounting import num_written_slots, slot_usage
from chairlift.core.measuring.request_meter import RequestMeter
from chairlift.core.measuring.wait_log import WaitLog
from chairlift.errors import RequestError
from chairlift.events import (
    EventSink,
    PrefixCacheChanged,
    RequestArrived,
    RequestFinished,
    RequestQueued,
    RequestRejected,
    Step,
)
from chairlift.outputs import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from chairlift.request import Request, WaitReason


def _new_blocks(output: SchedulerOutput, forked: dict[str, list[int]]) -> dict[str, list[int]]:
    """The blocks that each request receives in the step, in all groups of layers, and before it by a fork."""
    blocks = forked | {new.request_id: held_blocks(new.block_ids) for new in output.new_requests}
    for request_id, added in output.new_block_ids.items():
        blocks[request_id] = blocks.get(request_id, []) + held_blocks(added)
    return blocks


UNKNOWN_DEMAND: Final = MemoryDemand(0, 0, 0, 0)


class SchedulerMeter:
    """Observes one scheduler. Its methods are called when the thing that their name says has happened.

    Args:
        events: receives what happens; without it no event is built.

    Attributes:
        blocked: the head of the queue, and why it is not in the step that is planned; None if the queue is empty.
        preempted: ids of requests whose preemption the next planned step reports; swapped: those of them whose K and V
            are in the swap space.
    """

    def __init__(self, kv_cache_manager: KVCacheManager, events: EventSink | None, is_fair: bool) -> None:
        self._kv = kv_cache_manager
        self._events = events
        self._waits = WaitLog(kv_cache_manager, events, is_fair)
        self._num_groups = len(kv_cache_manager.windows)
        self._released: dict[str, list[int]] = {}
        self._forked: dict[str, list[int]] = {}
        self._matched: dict[str, int] = {}
        self._displaced: dict[str, str] = {}
        self._num_evicted = 0
        self._recomputing: dict[str, Request] = {}
        self._steps: deque[tuple[SchedulerOutput, dict[str, list[int]], dict[str, Any]]] = deque()
        self.blocked: tuple[Request, WaitReason] | None = None
        self.preempted: list[str] = []
        self._num_preempted_before = 0
        self.swapped: list[str] = []

    # -- arrival and queue ---------------------------------------------------------------------------------------

    def record_rejection(self, request: Request, error: RequestError) -> None:
        if self._events is not None:
            self._events.emit(RequestRejected(request.arrival_time, request.request_id, str(error)))

    def record_arrival(self, request: Request) -> None:
        request.meter = RequestMeter()
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
            )
        )

    def record_enqueued(self, request: Request) -> None:
        self._waits.start(request)

    def record_parked(self, request: Request, num_running: int) -> None:
        self._waits.start(request)
        # What it needs is known when the prompt of its leader is computed.
        self._waits.record_reason(
            request, WaitReason.SIBLING_PREFILL, request.arrival_time, num_running, UNKNOWN_DEMAND
        )

    def record_unparked(self, request: Request, now: float) -> None:
        self._waits.stop(request)
        if self._events is not None:
            self._events.emit(RequestQueued(now, request.request_id, self._waits.num_steps))

    def record_blocked(
        self, head: Request, reason: WaitReason, now: float, num_running: int, demand: MemoryDemand | None = None
    ) -> None:
        """Record why the head of the queue is not in this step; `demand` as in `WaitLog.record_reason`."""
        self.blocked = head, reason
        self._waits.record_head(head, reason, now, num_running, demand)

    # -- memory of running requests ------------------------------------------------------------------------------

    def record_admission(self, request: Request, now: float) -> None:
        self._waits.stop(request)
        meter: RequestMeter = request.meter
        meter.start_holding(self._kv.num_held_slots(request), num_written_slots(request, self._kv), now)
        if meter.recompute_until > request.num_computed_tokens:
            self._recomputing[request.request_id] = request
        if (num_matched := self._kv.prefixes.num_matched_tokens(request)) > request.num_computed_tokens:
            self._matched[request.request_id] = num_matched
        if meter.first_scheduled_time is None:
            meter.first_scheduled_time = now
            meter.num_cached_tokens = request.num_computed_tokens

    def record_growth(self, request: Request, change: TableChange, now: float) -> None:
        num_added = sum(map(len, change.added))
        request.meter.hold_moment += num_added * self._kv.block_size * now
        if change.released:
            self.record_released(request, change.released, now)

    def record_released(self, request: Request, block_ids: list[int], now: float) -> None:
        """Record that the request has released blocks that left a window."""
        moment = len(block_ids) * self._kv.block_size * now
        request.meter.hold_moment -= moment
        request.meter.write_moment -= moment
        self._released.setdefault(request.request_id, []).extend(block_ids)

    def record_fork(self, request: Request, before: list[int], now: float) -> None:
        """Record that a beam continues another one, so that it holds other blocks than `before`. They are as many, if
        both have released equally many that left a window."""
        held = held_blocks(self._kv.block_tables(request))
        moment = (len(held) - len(before)) * self._kv.block_size * now
        request.meter.hold_moment += moment
        request.meter.write_moment += moment
        self._released[request.request_id] = before
        self._forked[request.request_id] = held

    def record_freeing(self, request: Request, now: float) -> None:
        """Record that the memory of the request is about to be freed."""
        num_written = num_written_slots(request, self._kv)
        request.meter.stop_holding(self._kv.num_held_slots(request), num_written, now)
        self._released.pop(request.request_id, None)
        self._forked.pop(request.request_id, None)

    def record_preemption(self, request: Request, is_swapped: bool) -> None:
        """Record that the request, whose progress is not reset yet, is being preempted."""
        if is_swapped:
            self.swapped.append(request.request_id)
        request.meter.recompute_until = max(request.meter.recompute_until, request.num_computed_tokens)
        self.preempted.append(request.request_id)
        self._recomputing.pop(request.request_id, None)

    def record_displacement(self, head: Request) -> None:
        """Record that what was preempted since `begin_step` gives its seats to the head of the queue."""
        self._displaced |= dict.fromkeys(self.preempted[self._num_preempted_before :], head.request_id)

    def record_accepted_drafts(self, request: Request, count: int, scheduled_time: float) -> None:
        request.meter.write_moment += count * self._num_groups * scheduled_time

    # -- steps ---------------------------------------------------------------------------------------------------

    def begin_step(self, released: Sequence[tuple[Request, list[int]]], now: float) -> None:
        """Start to observe the planning of a step; `released` are blocks that left a window by the last step."""
        self.blocked = None
        self._num_preempted_before = len(self.preempted)  # in attempts that scheduled nothing
        for request, block_ids in released:
            self.record_released(request, block_ids, now)

    def record_step(
        self,
        output: SchedulerOutput,
        requests: Sequence[Request],
        running: Sequence[Request],
        num_unfinished: int,
        now: float,
    ) -> None:
        """Record a planned step, before released siblings join the queue and before draft tokens are added.

        Args:
            requests: the requests of `output.num_scheduled_tokens`, in this order.
            running: all requests that hold memory.
            num_unfinished: the number of all requests: running, in the queue, and parked.
        """
        head, reason = self.blocked or (None, None)
        self._waits.count_step(reason, head)
        # This loop runs for each request and step, so it does nothing else.
        num_groups, counts = self._num_groups, output.num_scheduled_tokens.values()
        for request, count in zip(requests, counts):  # noqa: B905
            request.meter.write_moment += count * num_groups * now
        num_recomputed = self._count_recomputed(output) if self._recomputing else 0
        if self._events is not None:
            memory = self._kv.counts()
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
                "num_waiting": num_unfinished - len(running),
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

    def record_padding(self, request: Request, count: int) -> None:
        request.meter.num_padding_tokens += count

    def record_result(self, result: ModelRunnerOutput, finished: list[str], now: float) -> None:
        """Emit the event of the oldest step, whose result is processed; `finished` are the requests that it ended."""
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

    # -- outputs and the end of a request ------------------------------------------------------------------------

    def first_output(self, request: Request, output: EngineCoreOutput, now: float) -> EngineCoreOutput:
        """The first output with a token: adds the fields that only this output has."""
        meter: RequestMeter = request.meter
        meter.first_token_time = now
        return output._replace(num_cached_tokens=meter.num_cached_tokens, times=meter.times(request))

    def last_output(self, request: Request, output: EngineCoreOutput, now: float) -> EngineCoreOutput:
        """The last output of a request that finished at `now`: adds the fields that only this output has."""
        assert request.finish_reason is not None
        meter, last = request.meter, request.token_ids[-1]
        return output._replace(
            finish_reason=request.finish_reason.value,
            stop_token_id=last if request.num_output_tokens and last in request.stop_token_ids else None,
            times=meter.times(request, finished=now),
            stats=meter.stats(),
        )

    def pooled_output(self, request: Request, pooled: bytes, now: float) -> EngineCoreOutput:
        """The only output of a request that generates no tokens."""
        num_cached = request.meter.num_cached_tokens
        output = EngineCoreOutput(request.request_id, [], num_cached_tokens=num_cached, pooled=pooled)
        return self.last_output(request, output, now)

    def record_retained(self, request: Request, now: float) -> None:
        """Record that a request ended which keeps its memory until its batch ends."""
        request.meter.done_time = now

    def record_returned(self, request: Request, first_token_time: float | None) -> None:
        """Record when the output of a retained request is returned as a whole; None if it has none."""
        request.meter.first_token_time = first_token_time

    def record_finish(self, request: Request, has_run: bool, now: float) -> None:
        """Record the end of a request, whose memory is freed. `has_run`: it ended while it was running."""
        if not has_run:
            self._waits.stop(request)
        self._recomputing.pop(request.request_id, None)
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
