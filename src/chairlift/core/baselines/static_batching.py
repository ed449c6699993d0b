"""Static batching: the batch is closed when it starts, and its outputs are returned when all members have finished."""

from __future__ import annotations

from collections.abc import Iterable

from chairlift.core.continuous_batching import BatchingPolicy
from chairlift.core.kv.kv_cache_manager import MemoryDemand
from chairlift.core.running_batch import RunningBatch, StepPlan
from chairlift.errors import RequestError
from chairlift.outputs import EngineCoreOutput
from chairlift.request import FinishReason, Request, WaitReason


class BufferedOutputs:
    """Outputs by request, in the order of their steps; they are joined once, when they are taken."""

    def __init__(self) -> None:
        self._parts: dict[str, list[EngineCoreOutput]] = {}

    def add(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            self._parts.setdefault(output.request_id, []).append(output)

    def take(self, request_id: str) -> EngineCoreOutput:
        """Remove and return the joined outputs of the request; an empty output if there are none.

        The chunks of its prompt logprobs follow one another, because no member of a static batch is preempted. A chunk
        that does not reach the end of the prompt has neither a token nor the logprobs of one.
        """
        parts = self._parts.pop(request_id, [])
        logprobs = [entry for part in parts for entry in part.logprobs or ()]
        chunks = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
        return EngineCoreOutput(
            request_id,
            [token for part in parts for token in part.new_token_ids],
            logprobs=logprobs or None,
            prompt_logprobs=(chunks[0][0], [entry for _, chunk in chunks for entry in chunk]) if chunks else None,
            num_cached_tokens=max((part.num_cached_tokens for part in parts), default=0),
        )


class StaticBatching(BatchingPolicy):
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
    """

    name = "static"
    retains_finished = True

    def __init__(self, batch: RunningBatch) -> None:
        super().__init__(batch)
        self._outputs = BufferedOutputs()
        self._runs_to_global = batch.config.static_run_to == "global"
        self._longest_output = 0
        self._num_output_columns = 0
        # The head of the queue when the batch was closed, and why it is not a member.
        self._blocked_head: tuple[Request, WaitReason, MemoryDemand] | None = None

    def check(self, request: Request) -> None:
        """Raise RequestError if `static_run_to="global"` and the length of the request's output is not forced."""
        if not self._runs_to_global:
            return
        if request.output_len is None:
            raise RequestError(
                f"request {request.request_id}: static_run_to=global decodes every batch to the longest output of all "
                f"requests, so every request must have a forced length: set ignore_eos and max_tokens, without stop "
                f"strings or stop_token_ids. Choose --static-run-to batch to serve other requests.",
                "ignore_eos",
            )
        if not self._batch.running and not self._batch.waiting:
            self._longest_output = 0
        self._longest_output = max(self._longest_output, request.output_len)

    # -- outputs -------------------------------------------------------------------------------------------------

    def buffer(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Keep the outputs until the batch is complete, and return those of failed requests."""
        self._outputs.add(output for output in outputs if output.error is None)
        return [output for output in outputs if output.error is not None]

    def take_completed(self, now: float) -> list[tuple[Request, EngineCoreOutput | None]]:
        """Return all members if the batch is complete. Members that were aborted or failed get no output."""
        if not self._is_complete:
            return []
        return [(member, self._take_output(member, now)) for member in self._batch.running]

    def _take_output(self, member: Request, now: float) -> EngineCoreOutput | None:
        output = self._outputs.take(member.request_id)
        has_output = member.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        member.first_token_time = now if has_output else None
        return output if has_output else None

    @property
    def _is_complete(self) -> bool:
        """There is a batch, and no step is left to compute for it."""
        members = self._batch.running
        return bool(members) and all(m.finish_reason is not None for m in members) and not self._lacks_columns

    @property
    def _lacks_columns(self) -> bool:
        """The batch has fewer columns than the longest output of all requests, and not all members were aborted."""
        if not self._runs_to_global or self._num_output_columns >= self._longest_output:
            return False
        return any(member.finish_reason is not FinishReason.ABORT for member in self._batch.running)

    # -- steps ---------------------------------------------------------------------------------------------------

    def fill(self, plan: StepPlan) -> None:
        if not self._batch.running:
            self._start_batch(plan)
        if (head := self._batch.waiting.peek()) is not None:
            first, reason, demand = self._blocked_head or (None, WaitReason.BATCH, None)
            if first is head:
                self._batch.block_queue(head, reason, plan, demand)
            else:
                self._batch.block_queue(head, WaitReason.BATCH, plan)
        if self._batch.running:
            self._schedule_columns(plan)

    def _start_batch(self, plan: StepPlan) -> None:
        """Admit the members of a new batch."""
        batch = self._batch
        num_available = batch.kv.num_blocks
        self._num_output_columns = 0
        self._blocked_head = None
        while (request := batch.waiting.peek()) is not None:
            needed = batch.kv.worst_case_blocks(request)
            reason = None
            if len(batch.running) == batch.config.static_batch_size:
                reason = WaitReason.SEATS
            elif needed > num_available or not batch.allocate(request):
                reason = WaitReason.MEMORY
            if reason is not None:
                self._blocked_head = request, reason, self._demand(request, needed, num_available)
                return
            num_available -= needed
            batch.admit(request, plan)

    def _demand(self, request: Request, needed: int, num_available: int) -> MemoryDemand:
        """The demand of a worst case, out of the blocks that the worst cases of the members leave."""
        current = self._batch.kv.demand(request)
        evictable, largest = min(current.evictable, num_available), min(current.largest, num_available)
        return MemoryDemand(needed, num_available, evictable, largest)

    def _schedule_columns(self, plan: StepPlan) -> None:
        """Schedule the next columns of all rows: as many as the token budget allows, at least one."""
        members = self._batch.running
        uncomputed = [_num_uncomputed(member) for member in members]
        columns_left = max(uncomputed)
        if columns_left == 0 and not self._lacks_columns:
            return
        columns = min(max(columns_left, 1), self._batch.config.max_num_batched_tokens // len(members))
        for member, num_tokens in zip(members, uncomputed, strict=True):
            count = max(0, columns - (columns_left - num_tokens)) if num_tokens else 0
            self._schedule_row(member, count, columns - count, plan)
        if columns >= columns_left:
            self._num_output_columns += 1

    def _schedule_row(self, member: Request, count: int, padding: int, plan: StepPlan) -> None:
        if padding:
            plan.output.num_padding_tokens[member.request_id] = padding
            member.num_padding_tokens += padding
        start = member.num_computed_tokens
        if not count:
            plan.output.num_scheduled_tokens[member.request_id] = 0
            plan.num_computed.append(start)
            return
        if start + count > member.num_slots:
            has_grown = self._batch.grow(member, start + count, plan)
            assert has_grown, "the worst cases of all members fit the pool"
        self._batch.schedule_tokens(member, start, count, plan)


def _num_uncomputed(member: Request) -> int:
    """Known tokens without K and V. The last token of a request is never computed."""
    if member.finish_reason is not None or member.num_tokens == member.end_total_tokens:
        return 0
    return member.num_tokens - member.num_computed_tokens
