"""BeamGroup: the requests of one beam search as one unit of queue, memory and batch.

    prompt    leader  [============]          the siblings are parked until it is computed
    joining   leader  [============][x]       a sibling shares the full blocks of its leader,
              sibling [============][y]       and gets a copy of the block that is not full
    decode    in each step every beam computes a token; then beams are forked and dropped (see `beam_search`)

The queue has the leader only. Its beams join the batch in the step after it, and are preempted and finished with it. If
they were queued one by one, groups could wait for each other's seats without end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from chairlift.core.beam_search import BeamMove, BeamSearch, replace_tokens
from chairlift.core.continuous_batching import NextStep, RunningBatch
from chairlift.core.kv.block_tables import held_blocks
from chairlift.core.kv.kv_cache_manager import KVCacheManager, TableChange
from chairlift.core.measuring.scheduler_observer import SchedulerObserver
from chairlift.core.request_outputs import first_output, last_output
from chairlift.outputs import EngineCoreOutput, ModelRunnerOutput
from chairlift.request import FinishReason, Request, RequestStatus


class BeamGroup:
    """The leader, which computes the prompt, and its siblings, once they are added to `members`."""

    def __init__(self, leader: Request, batch: RunningBatch, kv: KVCacheManager, observer: SchedulerObserver) -> None:
        self.leader = leader
        self.members = [leader]
        self._search = BeamSearch(self.members)
        self._batch, self._kv, self._observer = batch, kv, observer
        self._has_joined = False
        self._moves: dict[str, tuple[str, int]] = {}

    # -- queue and seats -----------------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> bool:
        """Let a beam wait, for the first time or because it was preempted; returns whether it is the leader."""
        self._search.forget_continuations()
        self._moves.pop(request.request_id, None)
        self.leader.num_seats = self._search.width
        return request is self.leader

    @property
    def is_started(self) -> bool:
        """The first tokens were chosen."""
        return self._search.is_started

    @property
    def num_reserved_seats(self) -> int:
        """The seats of the siblings, while the leader is running and they have not joined it."""
        return self.leader.num_seats - 1 if self.leader.status is RequestStatus.RUNNING else 0

    @property
    def num_needed_blocks(self) -> int:
        """The free blocks that the admission of all beams needs."""
        return sum(map(self._kv.num_admission_blocks, self._search.active))

    @property
    def lacks_memory(self) -> bool:
        """The leader cannot be admitted, because the siblings could not join it."""
        return self.is_started and self.num_needed_blocks > self._kv.num_free_blocks

    def gather(self, running: list[Request]) -> None:
        """Move the siblings behind their leader, whatever their own keys are."""
        siblings = [each for each in running if each.group is self and each is not self.leader]
        if siblings:
            running[:] = [each for each in running if each.group is not self or each is self.leader]
            start = running.index(self.leader) + 1
            running[start:start] = siblings

    # -- a step --------------------------------------------------------------------------------------------------

    def prepare(self, request: Request, plan: NextStep) -> bool:
        """Let the siblings join the leader, and give all beams their memory for the step, when the turn of the leader
        comes. False if the group was preempted because memory is short."""
        if request is not self.leader or not self.is_started:
            return True
        batch, kv = self._batch, self._kv
        joining = [member for member in self.members if member.status is not RequestStatus.RUNNING]
        for member in self.members:  # first the blocks that several beams share
            if member.status is RequestStatus.RUNNING:
                self._observer.record_table_change(member, kv.release_outside(member), plan.time)
        is_fork = not self._has_joined and request.num_computed_tokens == request.num_tokens - 1
        while self._num_missing_blocks(joining, is_fork) > kv.num_free_blocks:
            if batch.preempt_last(plan) is request:
                return False
        for member in joining:
            if is_fork:
                kv.fork(member, request)
                member.num_computed_tokens = request.num_computed_tokens
            else:
                has_memory = batch.allocate_head(member)
                assert has_memory, "a request needs no more blocks after others have got theirs"
            batch.admit(member, plan)
            batch.running.remove(member)
            batch.running.insert(batch.running.index(request) + 1, member)
        batch.num_joining -= len(joining)
        self._has_joined, request.num_seats = True, 1
        plan.output.beams.update(self._moves)
        self._moves.clear()
        for member in self.members:
            if member.num_tokens > member.num_slots:
                has_memory = batch.grow(member, member.num_tokens, plan)
                assert has_memory, "the blocks of all beams are free"
        return True

    def _num_missing_blocks(self, joining: list[Request], is_fork: bool) -> int:
        """The free blocks that the known tokens of all beams need."""
        size, num_groups, num_needed = self._kv.block_size, len(self._kv.windows), 0
        for member in self.members:
            if member not in joining:
                num_needed += num_groups * max(0, -(-(member.num_tokens - member.num_slots) // size))
            elif is_fork:
                num_needed += num_groups * (-(-member.num_tokens // size) - self.leader.num_computed_tokens // size)
            else:
                num_needed += self._kv.num_admission_blocks(member)
        return num_needed

    # -- results -------------------------------------------------------------------------------------------------

    def record(self, request: Request, result: ModelRunnerOutput) -> None:
        """Keep the likely next tokens of a beam, instead of the sampled one."""
        request.drop_pending()
        self._search.record(request, result.logprobs[request.request_id][0])

    def advance(self, now: float) -> list[EngineCoreOutput]:
        """Choose the next beams if all have been computed; returns the answers, the best one first, if the search has
        ended."""
        if not self._search.can_advance:
            return []
        if moves := self._search.advance():
            self._move(moves, now)
            return []
        outputs = []
        for member, answer in zip(self.members, self._search.answers, strict=True):
            replace_tokens(member, [*member.token_ids[: member.num_prompt_tokens], *answer.token_ids])
            is_stopped = member.token_ids[-1] in member.stop_token_ids
            member.finish_reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
            logprobs = None if member.sampling_params.logprobs is None else answer.logprobs
            output = EngineCoreOutput(
                member.request_id, answer.token_ids, logprobs=logprobs, num_preemptions=member.num_preemptions
            )
            outputs.append(first_output(member, output, now))
        return outputs

    def _move(self, moves: list[BeamMove], now: float) -> None:
        """Let the beams continue the sequences that were chosen."""
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

    def close(self) -> Iterable[Request]:
        """End the search; returns the beams to finish, the leader last."""
        self._batch.groups.remove(self)
        for member in self.members:
            member.group = None
            if member.status is RequestStatus.WAITING and member is not self.leader:
                member.status = RequestStatus.PARKED  # It is not in the queue.
        return reversed(self.members)


def add_beam(
    request: Request, leader: Request | None, batch: RunningBatch, kv: KVCacheManager, observer: SchedulerObserver
) -> None:
    """Add a request to the group of its leader, or create the group of a leader."""
    if leader is None:
        assert request.leader_id is None, "a beam is added while its leader is unfinished"
        request.group = BeamGroup(request, batch, kv, observer)
        batch.groups.append(request.group)
    else:
        request.group = leader.group
        request.group.members.append(request)
        request.arrival_index = leader.arrival_index  # so that nothing comes between the beams of a group


def advance_groups(
    sampling: Sequence[Request], finish: Callable[[Request, FinishReason, float], None], now: float
) -> list[EngineCoreOutput]:
    """Choose the next beams of these requests, and finish the searches that have ended; returns their answers."""
    outputs = []
    for group in dict.fromkeys(request.group for request in sampling if request.group is not None):
        if answers := group.advance(now):
            finish(group.leader, FinishReason.LENGTH, now)
            outputs += [last_output(each, answer, now) for each, answer in zip(group.members, answers, strict=True)]
    return outputs
