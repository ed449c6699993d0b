"""One step between its schedule and its update, and the events that the scheduler emits."""

from __future__ import annotations

from dataclasses import dataclass, field

from chairlift.core.accounting import MemoryUse
from chairlift.core.kv_cache_manager import MemoryDemand
from chairlift.events import RequestArrived, RequestFinished, RequestWaiting, Step
from chairlift.outputs import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from chairlift.request import FinishReason, Request, WaitReason


@dataclass(slots=True)
class StepPlan:
    """What a schedule decided. `sampling` are the requests whose last known token is computed in this step, `prefilled`
    those whose prompt is; `wait_reason` is why the `head` of the queue is not in it."""

    output: SchedulerOutput
    scheduled_time: float
    sampling: list[Request] = field(default_factory=list)
    prefilled: list[Request] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    num_recomputed: int = 0
    wait_reason: WaitReason | None = None
    head: Request | None = None
    memory: MemoryUse | None = None
    num_running: int = 0
    num_waiting: int = 0
    free_blocks: int = 0
    evictable_blocks: int = 0

    def event(self, result: ModelRunnerOutput, finished: list[str], now: float) -> Step:
        """The step's event, once its result is known."""
        output, memory = self.output, self.memory
        assert memory is not None, "the state was sampled, because somebody listens"
        scheduled, padding = output.num_scheduled_tokens, output.num_padding_tokens
        return Step(
            time=now,
            step=output.step,
            scheduled_time=self.scheduled_time,
            request_ids=list(scheduled),
            num_scheduled=list(scheduled.values()),
            num_computed=self.num_computed,
            num_new=[len(result.token_ids.get(request_id, ())) for request_id in scheduled],
            admitted=self.admitted,
            preempted=self.preempted,
            finished=finished,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            free_blocks=self.free_blocks,
            evictable_blocks=self.evictable_blocks,
            num_padding=[padding.get(request_id, 0) for request_id in scheduled] if padding else [],
            num_recomputed=self.num_recomputed,
            new_blocks={new.request_id: new.block_ids for new in output.new_requests} | output.new_block_ids,
            token_states=memory.token_states,
            reserved=memory.reserved,
            internal=memory.internal,
            external=memory.external,
            free=memory.free,
            shared=memory.shared,
            saved=memory.saved,
            wait_reason=None if self.wait_reason is None else self.wait_reason.value,
            head_id=None if self.head is None else self.head.request_id,
        )


def arrived(request: Request, step: int) -> RequestArrived:
    return RequestArrived(
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


def waiting(
    request: Request, reason: WaitReason, demand: MemoryDemand, num_running: int, now: float, step: int
) -> RequestWaiting:
    return RequestWaiting(
        time=now,
        request_id=request.request_id,
        reason=reason.value,
        needed_blocks=demand.needed,
        free_blocks=demand.free,
        evictable_blocks=demand.evictable,
        largest_free_piece=demand.largest,
        num_running=num_running,
        step=step,
    )


def finished(request: Request, now: float, step: int) -> RequestFinished:
    assert request.finish_reason is not None
    return RequestFinished(
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


def timed_out(request: Request) -> EngineCoreOutput:
    assert request.deadline is not None
    num_output_tokens = request.num_output_tokens
    seconds = request.deadline - request.arrival_time
    return EngineCoreOutput(
        request.request_id,
        [],
        finish_reason=FinishReason.TIMEOUT.value,
        num_preemptions=request.num_preemptions,
        error=f"the timeout of {round(seconds, 3):g} s passed when {num_output_tokens} output tokens were computed: "
        f"allow more time, or ask for fewer tokens",
        error_param="timeout",
    )
