"""Static batching: the batch is closed when it starts, and its outputs are returned when all members have finished."""

from __future__ import annotations

from collections import defaultdict

from chairlift.config import SchedulerConfig
from chairlift.core.continuous_batching import NextStep, RunningBatch
from chairlift.core.kv.kv_cache_manager import KVCacheManager, MemoryDemand
from chairlift.core.length_predictors import forced_output_len
from chairlift.core.measuring.scheduler_observer import SchedulerObserver
from chairlift.core.request_outputs import last_output
from chairlift.core.scheduler import Scheduler
from chairlift.outputs import EngineCoreOutput, join_outputs
from chairlift.request import FinishReason, Request, RequestStatus, WaitReason


class StaticBatching(RunningBatch):
    """Request-level batching, as serving systems did it before continuous batching.

        columns  0                         prompt ends               the batch ends
        row 0    |. . . . . prompt prompt  | output output output output|
        row 1    |prompt prompt prompt ..  | output output .  .  .  .  .|
                  ^ left padding             finished, but keeps row and slots ^

    Each step computes some columns of all rows. Members are taken from the queue in its order: at most
    `static_batch_size`, and only while their worst cases together fit the empty pool, so no member is ever preempted.
    For a member that has finished or was aborted, a step computes one padding token.

    With `static_run_to="global"` the batch continues until it has computed as many output columns as the longest output
    of all requests that arrived since the engine was last empty. This is the baseline of Anyscale's continuous batching
    benchmark (2023), where a Hugging Face pipeline decoded every batch to that length.

    Attributes:
        buffered: the outputs of each request in the order of their steps, until the batch is complete.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, observer: SchedulerObserver) -> None:
        super().__init__(config, kv_cache_manager, observer)
        self._runs_to_global = config.static_run_to == "global"
        self._longest_output = 0
        self._num_output_columns = 0
        self.buffered: defaultdict[str, list[EngineCoreOutput]] = defaultdict(list)
        # The head of the queue when the batch was closed, and why it is not a member.
        self._blocked_head: tuple[Request, WaitReason, MemoryDemand] | None = None

    def check(self, request: Request) -> None:
        """Raise RequestError if `static_run_to="global"` and the length of the request's output is not forced."""
        if not self._runs_to_global:
            return
        policy = "static_run_to=global decodes every batch to the longest output of all requests"
        output_len = forced_output_len(request, policy, "--static-run-to batch")
        if not self.running and not self.waiting:
            self._longest_output = 0
        self._longest_output = max(self._longest_output, output_len)

    def fill(self, plan: NextStep) -> None:
        if not self.running:
            self._start_batch(plan)
        if (head := self.waiting.peek()) is not None:
            first, reason, demand = self._blocked_head or (None, WaitReason.BATCH, None)
            if first is not head:
                reason, demand = WaitReason.BATCH, None
            self._observer.record_blocked(head, reason, plan.time, demand)
        if self.running:
            self._schedule_columns(plan)

    def _start_batch(self, plan: NextStep) -> None:
        """Admit the members of a new batch."""
        num_available = self._kv.num_blocks
        self._num_output_columns = 0
        self._blocked_head = None
        while (request := self.waiting.peek()) is not None:
            needed = self._kv.worst_case_blocks(request)
            reason = None
            if len(self.running) == self._config.static_batch_size:
                reason = WaitReason.SEATS
            elif needed > num_available or not self.allocate_head(request):
                reason = WaitReason.MEMORY
            if reason is not None:
                # The demand of a worst case, out of the blocks that the worst cases of the members leave.
                evictable, largest = (min(each, num_available) for each in self._kv.demand(request)[2:])
                demand = MemoryDemand(needed, num_available, evictable, largest)
                self._blocked_head = request, reason, demand
                return
            num_available -= needed
            self.admit(self.waiting.pop(), plan)

    def _schedule_columns(self, plan: NextStep) -> None:
        """Schedule the next columns of all rows: as many as the token budget allows, at least one."""
        members = self.running
        uncomputed = [_num_uncomputed(member) for member in members]
        columns_left = max(uncomputed)
        if columns_left == 0 and not self._lacks_columns:
            return
        columns = min(max(columns_left, 1), self._config.max_num_batched_tokens // len(members))
        for member, num_tokens in zip(members, uncomputed, strict=True):
            count = max(0, columns - (columns_left - num_tokens)) if num_tokens else 0
            self._schedule_row(member, count, columns - count, plan)
        if columns >= columns_left:
            self._num_output_columns += 1

    def _schedule_row(self, member: Request, count: int, padding: int, plan: NextStep) -> None:
        if padding:
            plan.output.num_padding_tokens[member.request_id] = padding
        start = member.num_computed_tokens
        if not count:
            plan.output.num_scheduled_tokens[member.request_id] = 0
            plan.requests.append(member)
            return
        if start + count > member.num_slots:
            has_grown = self.grow(member, start + count, plan)
            assert has_grown, "the worst cases of all members fit the pool"
        self.schedule_tokens(member, start, count, plan)

    @property
    def is_complete(self) -> bool:
        """There is a batch, and no step is left to compute for it."""
        members = self.running
        return bool(members) and all(m.finish_reason is not None for m in members) and not self._lacks_columns

    @property
    def _lacks_columns(self) -> bool:
        """The batch has fewer columns than the longest output of all requests, and not all members were aborted."""
        if not self._runs_to_global or self._num_output_columns >= self._longest_output:
            return False
        return any(member.finish_reason is not FinishReason.ABORT for member in self.running)


class StaticScheduler(Scheduler):
    """Schedules static batches. A finished member keeps its seat and its memory until the batch is complete, and its
    outputs are returned then."""

    batching = "static"
    make_batch = StaticBatching
    _batch: StaticBatching

    def _check(self, request: Request) -> None:
        super()._check(request)
        self._batch.check(request)

    def abort(self, request_id: str, now: float, reason: FinishReason = FinishReason.ABORT) -> bool:
        is_aborted = super().abort(request_id, now, reason)
        if is_aborted:
            self._outbox += self._end_batch(now)
        return is_aborted

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        if request.status is RequestStatus.RUNNING:
            request.finish_reason = reason
            request.meter.done_time = now
        else:
            super()._finish(request, reason, now)

    def _release_outputs(self, outputs: list[EngineCoreOutput], plan: NextStep, now: float) -> list[EngineCoreOutput]:
        """Keep the outputs until the batch is complete, and return the outputs of failed requests."""
        for output in outputs:
            if output.error is None:
                self._batch.buffered[output.request_id].append(output)
        return [output for output in outputs if output.error is not None] + self._end_batch(now)

    def _end_batch(self, now: float) -> list[EngineCoreOutput]:
        """Remove all members and return their outputs, if the batch is complete and no step of it is in flight. Members
        that were aborted or failed get no output."""
        if self._in_flight or not self._batch.is_complete:
            return []
        outputs = []
        for member in self._batch.running:
            output = join_outputs(member.request_id, self._batch.buffered.pop(member.request_id, ()))
            has_output = member.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            member.meter.first_token_time = now if has_output else None
            self._remove(member, now)
            if has_output:
                outputs.append(last_output(member, output, now))
        self._batch.drop_finished()
        return outputs


def _num_uncomputed(member: Request) -> int:
    """Known tokens without K and V. The last token of a request is never computed."""
    if member.finish_reason is not None or member.num_tokens == member.end_total_tokens:
        return 0
    return member.num_tokens - member.num_computed_tokens
