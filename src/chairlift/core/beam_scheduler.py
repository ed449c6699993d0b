"""BeamScheduler: continuous batching of requests with and without beam search.

    prompt    leader  [============]          the siblings are parked until it is computed
    joining   leader  [============][x]       a sibling shares the full blocks of its leader,
              sibling [============][y]       and gets a copy of the block that is not full
    decode    in each step every beam computes a token; then beams are forked and dropped (see `beam_group`)

The queue has the leader only. Its beams join the batch in the step after it, and are preempted and finished with it.
"""

from __future__ import annotations

from chairlift.config import SchedulerConfig
from chairlift.core.beam_group import BeamGroup, BeamMove, replace_tokens
from chairlift.core.chunk_allowance import ChunkAllowance
from chairlift.core.continuous_batching import ContinuousBatching, NextStep
from chairlift.core.kv.block_tables import held_blocks
from chairlift.core.kv.kv_cache_manager import KVCacheManager, TableChange
from chairlift.core.kv.kv_groups import FULL
from chairlift.core.measuring.scheduler_observer import SchedulerObserver
from chairlift.core.request_outputs import first_output, last_output
from chairlift.core.scheduler import Scheduler
from chairlift.errors import RequestError
from chairlift.outputs import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from chairlift.request import FinishReason, Request, RequestStatus, WaitReason


class BeamBatching(ContinuousBatching):
    """Continuous batching in which the beams of a group run together.

    Attributes:
        groups: the groups of unfinished beams, by the id of their leader.
        computed: the groups whose likely next tokens are all known.
        failed: outputs of beams that ended with an error of another one.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, observer: SchedulerObserver) -> None:
        super().__init__(config, kv_cache_manager, observer)
        self.groups: dict[str, BeamGroup] = {}
        self.computed: list[BeamGroup] = []
        self.failed: list[EngineCoreOutput] = []
        self._moves: dict[str, tuple[str, int]] = {}

    def group_of(self, request: Request) -> BeamGroup | None:
        """The group of a beam; None for other requests."""
        return self.groups.get(request.leader_id or request.request_id) if self.groups else None

    def begin_step(self, now: float) -> None:
        """As for other requests. The beams of a group come after their leader, whatever their own keys are."""
        super().begin_step(now)
        if self.groups and not self.waiting.has_constant_keys:
            siblings = [each for each in self.running if each.leader_id in self.groups]
            first = [each for each in self.running if each.leader_id not in self.groups]
            self.running = [
                member for each in first for member in (each, *(s for s in siblings if s.leader_id == each.request_id))
            ]

    def end_step(self, plan: NextStep) -> None:
        plan.output.beams.update(self._moves)
        self._moves.clear()
        super().end_step(plan)

    # -- seats and memory ----------------------------------------------------------------------------------------

    @property
    def _num_reserved_seats(self) -> int:
        """The seats of beams whose leader is running, and that have not joined it."""
        return sum(group.width - 1 for group in self._incomplete_groups)

    @property
    def _incomplete_groups(self) -> list[BeamGroup]:
        running = RequestStatus.RUNNING
        groups = self.groups.values()
        return [each for each in groups if each.leader.status is running and each.members[-1].status is not running]

    @property
    def num_free_seats(self) -> int:
        return super().num_free_seats - self._num_reserved_seats

    def num_seats(self, request: Request) -> int:
        group = self.group_of(request)
        has_all = group is None or request is not group.leader or group.members[-1].status is RequestStatus.RUNNING
        return 1 if has_all or group is None else group.width

    def num_needed_blocks(self, request: Request) -> int:
        group = self.group_of(request)
        members = group.members if group is not None and group.is_started else [request]
        return sum(map(self._num_admission_blocks, members))

    def _schedule_running(self, plan: NextStep, chunks: ChunkAllowance) -> tuple[int, bool]:
        """As for other requests. Chunks also leave a token to each beam that joins its leader in this step."""
        self._num_joining = sum(group.width - 1 for group in self._incomplete_groups if group.is_started)
        budget, has_preempted = super()._schedule_running(plan, chunks)
        self._num_joining = 0
        return budget, has_preempted

    def _try_to_allocate(self, request: Request, budget: int) -> WaitReason | None:
        group = self.group_of(request)
        if group is not None and group.is_started and self.num_needed_blocks(request) > self._kv.num_free_blocks:
            return WaitReason.SEATS if self.num_seats(request) > self.num_free_seats else WaitReason.MEMORY
        return super()._try_to_allocate(request, budget)

    def prepare_beams(self, request: Request, plan: NextStep) -> bool:
        """Let the beams of a group join its leader, and give all of them their memory for the step, when the turn of
        the leader comes. False if the group was preempted because memory is short."""
        group = self.group_of(request)
        if group is None or not group.is_started or request is not group.leader:
            return True
        joining = [member for member in group.members if member.status is not RequestStatus.RUNNING]
        self._release_outside(group, plan)
        is_fork = not group.has_joined and request.num_computed_tokens == request.num_tokens - 1
        while self._num_needed_blocks(group, joining, is_fork) > self._kv.num_free_blocks:
            if self.preempt_last(plan) is request:
                return False
        for member in joining:
            if is_fork:
                self._kv.fork(member, request)
                member.num_computed_tokens = request.num_computed_tokens
            else:
                has_memory = self.allocate_head(member)
                assert has_memory, "a request needs no more blocks after others have got theirs"
            self.admit(member, plan)
            self.running.remove(member)
            self.running.insert(self.running.index(request) + 1, member)
        self._num_joining -= len(joining)
        group.has_joined = True
        for member in group.members:
            if member.num_tokens > member.num_slots:
                has_memory = self.grow(member, member.num_tokens, plan)
                assert has_memory, "the blocks of all beams are free"
        return True

    def _num_needed_blocks(self, group: BeamGroup, joining: list[Request], is_fork: bool) -> int:
        """The free blocks that the known tokens of all beams need."""
        size, num_groups, num_needed = self._kv.block_size, len(self._kv.windows), 0
        for member in group.members:
            if member not in joining:
                num_needed += num_groups * max(0, -(-(member.num_tokens - member.num_slots) // size))
            elif is_fork:
                num_needed += num_groups * (-(-member.num_tokens // size) - group.leader.num_computed_tokens // size)
            else:
                num_needed += self._num_admission_blocks(member)
        return num_needed

    def _num_admission_blocks(self, request: Request) -> int:
        """The free blocks that a request needs, also if others are admitted before it. With windows this is the most
        that it ever holds, because what it needs depends on the prefix that is cached, which others may evict."""
        has_windows = self._kv.windows != FULL
        return self._kv.worst_case_blocks(request) if has_windows else self._kv.demand(request).needed

    def _release_outside(self, group: BeamGroup, plan: NextStep) -> None:
        """Release the blocks that left their windows, first those that several beams share."""
        for member in group.members:
            if member.status is RequestStatus.RUNNING:
                self._observer.record_table_change(member, self._kv.release_outside(member), plan.time)

    def preempt_last(self, plan: NextStep, displacing: Request | None = None) -> Request:
        """Preempt the running request with the largest key, and all beams of its group; returns their leader."""
        group = self.group_of(self.running[-1])
        if group is None:
            return super().preempt_last(plan, displacing)
        group.forget_continuations()
        while (member := self.running[-1]) is not group.leader:
            assert self.group_of(member) is group, "the beams of a group follow their leader"
            super().preempt_last(plan, displacing)
            self.waiting.discard(member)
        for member in group.members:
            self._moves.pop(member.request_id, None)
        return super().preempt_last(plan, displacing)

    def remove(self, request: Request) -> None:
        self._moves.pop(request.request_id, None)
        super().remove(request)

    def move_beams(self, moves: list[BeamMove], now: float) -> None:
        """Let the beams of a group continue the sequences that were chosen."""
        forked = {each.request_id: [*parent.token_ids] for each, parent, _token in moves if each is not parent}
        for request, parent, token in moves:
            if request.status is RequestStatus.RUNNING:
                self._moves[request.request_id] = parent.request_id, token
                if request is not parent:
                    before = held_blocks(self._kv.block_tables(request))
                    self._kv.fork(request, parent)
                    change = TableChange(self._kv.block_tables(request), before, is_fork=True)
                    self._observer.record_table_change(request, change, now)
        for request, _parent, token in moves:
            token_ids = forked.get(request.request_id, request.token_ids)
            token_ids.append(token)
            replace_tokens(request, token_ids)


class BeamScheduler(Scheduler):
    """Schedules requests with and without beam search, in continuous batches over paged memory."""

    make_batch = BeamBatching
    _batch: BeamBatching

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - self.num_running

    def add(self, request: Request) -> None:
        super().add(request)
        if not request.sampling_params.use_beam_search:
            return
        if request.leader_id is None:
            self._batch.groups[request.request_id] = BeamGroup(request)
        else:
            group = self._batch.groups[request.leader_id]
            group.members.append(request)
            request.arrival_index = group.leader.arrival_index  # so that nothing comes between the beams of a group

    def _check(self, request: Request) -> None:
        super()._check(request)
        if not request.sampling_params.use_beam_search:
            return
        width, num_blocks = request.sampling_params.n, self._kv.num_blocks
        if width > self._config.max_num_seqs:
            raise RequestError(
                f"n={width} beams need as many seats, and max_num_seqs="
                f"{self._config.max_num_seqs}: lower n, or raise --max-num-seqs",
                "n",
            )
        if (needed := width * self._kv.worst_case_blocks(request)) > num_blocks:
            raise RequestError(
                f"the request can never fit: n={width} beams of up to {request.max_total_tokens} "
                f"tokens need {needed} blocks of {self._kv.block_size} while they share none, and the whole pool has "
                f"{num_blocks}. Lower n or max_tokens, shorten the prompt, or raise --kv-cache-memory-bytes.",
                "max_tokens",
            )

    def schedule(self, now: float) -> SchedulerOutput | None:
        """As for other requests. While there are beams, a step is planned when the results of all others are known."""
        return None if self._batch.groups and self._in_flight else super().schedule(now)

    # -- results -------------------------------------------------------------------------------------------------

    def _take_result(self, request: Request, result: ModelRunnerOutput, plan: NextStep, now: float) -> EngineCoreOutput:
        """Keep the likely next tokens of a beam, whose output is dropped by `_release_outputs`."""
        group = self._batch.group_of(request)
        if group is None:
            return super()._take_result(request, result, plan, now)
        request.drop_pending()
        if group.record(request, result.logprobs[request.request_id][0]):
            self._batch.computed.append(group)
        return EngineCoreOutput(request.request_id, [])

    def _fail(self, request: Request, error: str, now: float) -> EngineCoreOutput:
        """As for other requests. The other beams of the group end with the same error."""
        group = self._batch.group_of(request)
        output = super()._fail(request, error, now)
        others = [] if group is None else [member for member in group.members if member is not request]
        self._batch.failed += [output._replace(request_id=member.request_id) for member in others]
        return output

    def _release_outputs(
        self, outputs: list[EngineCoreOutput], finished: list[str], now: float
    ) -> list[EngineCoreOutput]:
        """Choose the next beams where all have been computed, and return the answers of searches that have ended."""
        outputs += self._batch.failed
        finished += [output.request_id for output in self._batch.failed]
        self._batch.failed = []
        outputs = [
            output
            for output in outputs
            if output.new_token_ids or output.finish_reason is not None or output.prompt_logprobs is not None
        ]
        computed, self._batch.computed = self._batch.computed, []
        for group in computed:
            if group.leader.is_finished:
                continue
            if moves := group.advance():
                self._batch.move_beams(moves, now)
            else:
                answers = self._end(group, now)
                finished += [answer.request_id for answer in answers]
                outputs += answers
        return outputs

    def _end(self, group: BeamGroup, now: float) -> list[EngineCoreOutput]:
        """Finish all beams of a group; returns an answer for each of them, the best one for the leader."""
        outputs = {}
        for member, answer in zip(group.members, group.answers, strict=True):
            replace_tokens(member, [*member.token_ids[: member.num_prompt_tokens], *answer.token_ids])
            logprobs = None if member.sampling_params.logprobs is None else answer.logprobs
            output = EngineCoreOutput(
                member.request_id, answer.token_ids, logprobs=logprobs, num_preemptions=member.num_preemptions
            )
            outputs[member.request_id] = first_output(member, output, now)
        self._finish_group(group, None, now)
        return [last_output(member, outputs[member.request_id], now) for member in group.members]

    def _finish_group(self, group: BeamGroup, reason: FinishReason | None, now: float) -> None:
        """Finish all beams, the leader last. For None each one gets the reason that its sequence shows."""
        for member in reversed(group.members):
            is_stopped = member.token_ids[-1] in member.stop_token_ids
            super()._finish(member, reason or (FinishReason.STOP if is_stopped else FinishReason.LENGTH), now)
        del self._batch.groups[group.leader.request_id]

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        group = self._batch.group_of(request)
        if group is None:
            super()._finish(request, reason, now)
        else:
            self._finish_group(group, reason, now)

    def _remove(self, request: Request, now: float) -> None:
        group = self._batch.group_of(request)
        if group is not None and request is not group.leader and request.status is RequestStatus.WAITING:
            self._siblings.park(request, group.leader.request_id)  # It waits outside of the queue.
        super()._remove(request, now)

    def _release_siblings(self, leader: Request, now: float) -> None:
        """As for other requests, but beams wait outside of the queue until they join their leader."""
        if self._batch.group_of(leader) is None:
            super()._release_siblings(leader, now)
            return
        for sibling in self._siblings.release(leader):
            sibling.status = RequestStatus.WAITING
            self._observer.record_queued(sibling, now)
