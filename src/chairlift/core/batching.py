"""Who may join the batch now, and what its members compute: continuous and static batching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from chairlift.core.batch import Batch
from chairlift.core.kv_cache_manager import MemoryDemand
from chairlift.core.step_plan import StepPlan
from chairlift.errors import RequestError
from chairlift.request import FinishReason, Request, WaitReason


class Batching(Protocol):
    """Fills steps.

    Attributes:
        is_closed: members that end stay until the whole batch is over.
    """

    is_closed: bool

    @property
    def is_over(self) -> bool:
        """There is a closed batch, and nothing is left to compute for it."""
        ...

    def accept(self, request: Request) -> None:
        """A request arrives; raises RequestError if it cannot be batched this way."""
        ...

    def fill(self, plan: StepPlan) -> None:
        """Decide what is computed in this step."""
        ...


class ContinuousBatching:
    """The batch is chosen anew at every step (Orca; Yu et al., OSDI'22, section 3.1): running requests first, then
    waiting ones, within the token budget and the seats. Prompts are computed in chunks (Sarathi-Serve; Agrawal et al.,
    OSDI'24, section 4). When memory is short, the running request with the largest key is preempted (Kwon et al.,
    SOSP'23, section 4.5): it stands behind everyone already scheduled in the step, so nothing is ever taken back.
    """

    is_closed = False
    is_over = False

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def accept(self, request: Request) -> None:
        """Every request will do."""

    def fill(self, plan: StepPlan) -> None:
        budget, has_preempted = self._schedule_running(plan)
        self._schedule_waiting(plan, budget, may_admit=not has_preempted)

    def _schedule_running(self, plan: StepPlan) -> tuple[int, bool]:
        """Give every running request what it lacks; returns what is left of the token budget, and whether somebody was
        preempted.

        A chunk leaves one token to everyone behind it, and to everyone who waits for a seat that is free: a decode
        never stalls behind a prompt, and a freed seat is taken in the next step. That is always possible, because
        max_num_batched_tokens >= max_num_seqs.
        """
        batch = self._batch
        running = batch.running
        budget = batch.config.max_num_batched_tokens
        num_running, newcomers = len(running), batch.num_newcomers
        index = 0
        while index < len(running):
            request = running[index]
            index += 1
            start = request.num_computed_tokens
            count = request.num_tokens - start
            if count > 1:
                count = min(count, budget - newcomers - (len(running) - index))
            elif not count or request.num_tokens == request.end_total_tokens:
                continue
            if start + count > request.num_slots and not self._grow(request, start + count, plan):
                break
            batch.schedule_tokens(request, start, count, plan)
            budget -= count
        return budget, len(running) < num_running

    def _grow(self, request: Request, num_slots: int, plan: StepPlan) -> bool:
        """Extend the request's memory, preempting from the end of the batch; False if that took the request itself."""
        while not self._batch.grow(request, num_slots, plan):
            if self._batch.preempt_last(plan) is request:
                return False
        return True

    def _schedule_waiting(self, plan: StepPlan, budget: int, may_admit: bool) -> None:
        """Admit from the head of the queue while there are seats, tokens and memory."""
        batch = self._batch
        while (request := batch.waiting.peek()) is not None:
            reason = self._refusal(request) if may_admit else WaitReason.PREEMPTION
            if reason is not None:
                batch.refuse(request, reason, plan)
                return
            batch.introduce(request, plan)
            start = request.num_computed_tokens
            count = min(request.num_tokens - start, budget - batch.num_newcomers)
            batch.schedule_tokens(request, start, count, plan)
            budget -= count

    def _refusal(self, request: Request) -> WaitReason | None:
        """Why the head of the queue is not admitted; None if it was, and then it holds its memory."""
        if len(self._batch.running) >= self._batch.config.max_num_seqs:
            return WaitReason.SEATS
        if request.num_pending_tokens:
            return WaitReason.PENDING_TOKEN
        return None if self._batch.admit(request) else WaitReason.MEMORY


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The head of the queue when a batch was closed, and why it is no member."""

    request: Request
    reason: WaitReason
    demand: MemoryDemand


class StaticBatching:
    """The batch is closed when it starts, and answers when its last member is done.

        columns  0                         prompt ends               the batch ends
        row 0    |. . . . . prompt prompt  | output output output output|
        row 1    |prompt prompt prompt ..  | output output .  .  .  .  .|
                  ^ left padding             done, but keeps row and slots ^

    Each step computes some columns of all rows. Members: in the queue's order, as many as `static_batch_size`, and only
    while their worst cases together fit the empty pool, so nobody is ever preempted. A step of a member that is done,
    or was aborted, is one padding token. With `static_run_to` "global" the batch goes on until it has computed as many
    output columns as the longest output of all requests has, of those that came since the engine was last empty: the
    baseline of Anyscale's continuous batching benchmark (2023), where a Hugging Face pipeline decoded every batch that
    far.
    """

    is_closed = True

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._runs_to_global = batch.config.static_run_to == "global"
        self._longest_output = 0
        self._num_output_columns = 0
        self._refusal: _Refusal | None = None

    @property
    def is_over(self) -> bool:
        members = self._batch.running
        return bool(members) and all(member.finish_reason is not None for member in members) and not self._owes_columns

    def accept(self, request: Request) -> None:
        if not self._runs_to_global:
            return
        if request.output_len is None:
            raise RequestError(
                f"request {request.request_id}: static_run_to=global decodes to the longest output of all requests, "
                f"so all of them must have a forced length: ignore_eos, max_tokens, and no stop strings or "
                f"stop_token_ids. Choose --static-run-to batch to serve others.",
                "ignore_eos",
            )
        if not self._batch.running and not self._batch.waiting:
            self._longest_output = 0
        self._longest_output = max(self._longest_output, request.output_len)

    def fill(self, plan: StepPlan) -> None:
        if not self._batch.running:
            self._close(plan)
        if (head := self._batch.waiting.peek()) is not None:
            refusal = self._refusal
            if refusal is not None and refusal.request is head:
                self._batch.refuse(head, refusal.reason, plan, refusal.demand)
            else:
                self._batch.refuse(head, WaitReason.BATCH, plan)
        if self._batch.running:
            self._compute_columns(plan)

    def _close(self, plan: StepPlan) -> None:
        """Choose the members."""
        batch = self._batch
        num_unpromised = batch.kv.num_blocks
        self._num_output_columns = 0
        self._refusal = None
        while (request := batch.waiting.peek()) is not None:
            needed = batch.kv.worst_case_blocks(request)
            reason = None
            if len(batch.running) == batch.config.static_batch_size:
                reason = WaitReason.SEATS
            elif needed > num_unpromised or not batch.admit(request):
                reason = WaitReason.MEMORY
            if reason is not None:
                self._refusal = _Refusal(request, reason, self._worst_case_demand(request, needed, num_unpromised))
                return
            num_unpromised -= needed
            batch.introduce(request, plan)

    def _worst_case_demand(self, request: Request, needed: int, num_unpromised: int) -> MemoryDemand:
        """Of what the members will not take. They take evictable blocks last."""
        demand = self._batch.kv.demand(request)
        return MemoryDemand(
            needed=needed,
            free=num_unpromised,
            evictable=min(demand.evictable, num_unpromised),
            largest=min(demand.largest, num_unpromised),
        )

    def _compute_columns(self, plan: StepPlan) -> None:
        """The next columns of all rows: as many as the token budget allows, at least one."""
        members = self._batch.running
        lacking = [_num_lacking(member) for member in members]
        columns_left = max(lacking)
        if columns_left == 0 and not self._owes_columns:
            return
        columns = min(max(columns_left, 1), self._batch.config.max_num_batched_tokens // len(members))
        for member, lacks in zip(members, lacking, strict=True):
            count = max(0, columns - (columns_left - lacks)) if lacks else 0
            self._compute(member, count, columns - count, plan)
        if columns >= columns_left:
            self._num_output_columns += 1

    def _compute(self, member: Request, count: int, padding: int, plan: StepPlan) -> None:
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

    @property
    def _owes_columns(self) -> bool:
        """It is not as long as the longest output of all, and somebody waits for it."""
        if not self._runs_to_global or self._num_output_columns >= self._longest_output:
            return False
        return any(member.finish_reason is not FinishReason.ABORT for member in self._batch.running)


def _num_lacking(member: Request) -> int:
    """Known tokens without K and V; of one at its end none, since the last token is never computed."""
    if member.finish_reason is not None or member.num_tokens == member.end_total_tokens:
        return 0
    return member.num_tokens - member.num_computed_tokens


def make_batching(batch: Batch) -> Batching:
    """As the batch's configuration says (see `config.BATCHINGS`)."""
    return StaticBatching(batch) if batch.config.batching == "static" else ContinuousBatching(batch)
