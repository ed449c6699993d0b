"""Random schedules: limits hold, no request is lost, and every request gets the same tokens as when it runs alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chairlift.config import KV_ARENAS, SCHEDULING_POLICIES
from chairlift.core.baselines.arena import ARENAS
from chairlift.core.kv.block_tables import held_blocks
from chairlift.core.kv.kv_groups import FULL, KVGroups
from chairlift.core.kv.state_checkpoints import CheckpointPlan
from chairlift.core.measuring.accounting import slot_usage
from chairlift.errors import RequestError
from chairlift.events import RequestArrived, RequestFinished, RequestRejected, Step
from chairlift.outputs import SchedulerOutput
from chairlift.policy_class import FAIR_POLICIES
from chairlift.request import RequestStatus, WaitReason
from chairlift.slo import SLO
from support.fakes import PartlyRightProposals, collect, expected_tokens, make_engine, make_request
from support.kv_invariants import check_manager
from support.slot_census import slot_census

WINDOWS = st.sampled_from([FULL, FULL, (3,), (None, 5), (2, None, 2, 7), (None, 4, 4, None)])
CHECKPOINTS = st.one_of(st.none(), st.tuples(st.integers(0, 6), st.integers(1, 4)))
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, groups, aborts and steps against a checking executor (see `fakes`)."""

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 4),
        extra_budget=st.integers(0, 8),
        policy=st.sampled_from(SCHEDULING_POLICIES),
        caching=st.booleans(),
        steps_ahead=st.integers(0, 2),
        kv=st.sampled_from(["paged", "paged", "paged", "exact", "max", "pow2", "oracle"]),
        arena=st.sampled_from(KV_ARENAS),
        batching=st.sampled_from([("continuous", "batch"), ("static", "batch"), ("static", "global")]),
        windows=WINDOWS,
        acceptance=st.sampled_from([None, 0.0, 0.5, 1.0]),
        checkpoints=CHECKPOINTS,
        num_swap_blocks=st.sampled_from([0, 0, 3, 30]),
        speed=st.sampled_from([None, None, 0.2, 1.0]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        policy: str,
        caching: bool,
        steps_ahead: int,
        kv: str,
        arena: str,
        batching: tuple[str, str],
        windows: tuple[int | None, ...],
        acceptance: float | None,
        checkpoints: tuple[int, int] | None,
        num_swap_blocks: int,
        speed: float | None,
    ) -> None:
        self.kv = kv
        if kv != "paged" or checkpoints is not None:
            windows = FULL
        if checkpoints is not None:
            acceptance = None
        self.groups = KVGroups(windows, block_size, max_num_seqs + extra_budget)
        self.is_fair = policy in FAIR_POLICIES
        self.largest_piece = num_blocks if kv == "paged" else ARENAS[arena](num_blocks).largest_piece
        self.max_model_len = 64 if kv != "max" else max(2, block_size * self.largest_piece)
        self.must_be_forced = kv in ("pow2", "oracle") or batching[1] == "global"
        self.core, self.manager, self.executor, self.events = make_engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_model_len=self.max_model_len,
            scheduling_policy=policy,
            pacing_tokens_per_second=speed if batching[0] == "continuous" else None,
            enable_prefix_caching=caching,
            steps_ahead=steps_ahead,
            kv=kv,
            arena=arena,
            batching=batching[0],
            static_run_to=batching[1],
            windows=self.groups.windows,
            propose=None if acceptance is None or batching[1] == "global" else PartlyRightProposals(1, acceptance),
            checkpoints=None if checkpoints is None else CheckpointPlan(checkpoints[0], checkpoints[1] * block_size),
            num_swap_blocks=num_swap_blocks if windows == FULL else 0,
        )
        self.plan_step = self.core.scheduler.schedule
        self.core.scheduler.schedule = self.schedule  # type: ignore[method-assign]
        self.waited: dict[str, Counter[str]] = {}
        self.answers: dict[str, list[int]] = {}
        self.expected: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.count = 0

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int = 0,
        stop: Sequence[int] = (),
        leader: str | None = None,
        output_len: int | None = None,
        tenant: str = "",
        ttft_ms: float | None = None,
    ) -> str:
        self.count += 1
        name = f"r{self.count}"
        if self.must_be_forced and output_len is None:
            stop, output_len = (), max_tokens
        request = make_request(
            name,
            prompt,
            max_tokens,
            priority=priority,
            stop_token_ids=stop,
            leader_id=leader,
            output_len=output_len,
            tenant=tenant,
            is_streamed=self.count % 3 > 0,
            slo=None if ttft_ms is None else SLO(ttft_ms),
        )
        request.arrival_time = self.core.now()
        try:
            self.core.add(request)
            self.expected[name] = expected_tokens(prompt, output_len or max_tokens, stop)
            self.waited[name] = Counter()
        except RequestError:
            assert self.can_never_fit(len(prompt), max_tokens, output_len)
        else:
            assert not self.can_never_fit(len(prompt), max_tokens, output_len)
        return name

    def can_never_fit(self, num_prompt_tokens: int, max_tokens: int, output_len: int | None) -> bool:
        slots = {
            "paged": num_prompt_tokens + max_tokens - 1,
            "exact": num_prompt_tokens + max_tokens - 1,
            "max": self.max_model_len,
            "pow2": min(num_prompt_tokens + (1 << ((output_len or 1) - 1).bit_length()), self.max_model_len) - 1,
            "oracle": num_prompt_tokens + (output_len or 1) - 1,
        }[self.kv]
        blocks = sum(self.groups.most_blocks(slots))
        return num_prompt_tokens + max_tokens > self.max_model_len or blocks > self.largest_piece

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        stop_at=st.integers(0, 20),
        tenant=st.sampled_from("abc"),
        ttft_ms=st.sampled_from([None, 1, 2000, 20_000]),
    )
    def arrive(
        self, prompt: list[int], max_tokens: int, priority: int, stop_at: int, tenant: str, ttft_ms: float | None
    ) -> None:
        stop = expected_tokens(prompt, 20)[stop_at : stop_at + 1]
        self.add(prompt, max_tokens, priority, stop, tenant=tenant, ttft_ms=ttft_ms)

    @rule(prompt=PROMPTS, output_len=st.integers(1, 8), unused=st.integers(0, 6))
    def arrive_with_forced_length(self, prompt: list[int], output_len: int, unused: int) -> None:
        self.add(prompt, output_len + unused, output_len=output_len)

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 6), size=st.integers(2, 3))
    def arrive_as_group(self, prompt: list[int], max_tokens: int, size: int) -> None:
        leader = self.add(prompt, max_tokens)
        for _ in range(size - 1):
            self.add(prompt, max_tokens, leader=leader)

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Plan a step, and count it for every request that waits."""
        scheduler = self.core.scheduler
        parked = set(self.with_status(RequestStatus.PARKED))
        output = self.plan_step(now)
        if output is not None:
            blocked = scheduler._observer.blocked
            for name in parked:
                self.waited[name]["sibling_prefill"] += 1
            for name in set(self.with_status(RequestStatus.WAITING)) - parked:
                assert blocked is not None, "every wait has a reason"
                head, reason = blocked
                has_turn = not self.is_fair or scheduler.unfinished[name].tenant == head.tenant
                self.waited[name][reason.value if has_turn else "fairness"] += 1
        return output

    def with_status(self, status: RequestStatus) -> list[str]:
        requests = self.core.scheduler.unfinished.values()
        return [request.request_id for request in requests if request.status is status]

    @rule()
    def step(self) -> None:
        collect(self.core.step(), self.answers)
        self.core._clock.advance(0.5)  # type: ignore[attr-defined]

    @rule(count=st.integers(2, 10))
    def several_steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @precondition(lambda self: self.core.scheduler.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.core.scheduler.unfinished)))
        is_done = self.core.scheduler.unfinished[name].finish_reason is not None
        assert self.core.abort(name) is not is_done
        if not is_done:
            self.aborted.add(name)

    @invariant()
    def counts_and_limits_hold(self) -> None:
        scheduler = self.core.scheduler
        check_manager(self.manager)
        requests = scheduler.unfinished.values()
        running = [r for r in requests if r.status is RequestStatus.RUNNING]
        assert scheduler.num_running == len(running) <= self.executor.max_num_seqs
        assert scheduler.num_waiting == len(requests) - len(running)
        for request in requests:
            assert len(request.token_ids) + request.num_pending_tokens == request.num_tokens
            assert request.num_computed_tokens <= request.num_tokens <= request.max_total_tokens
            assert request.num_computed_tokens <= request.num_slots or request not in running
            if self.manager.num_held_slots(request) and self.groups.has_windows:
                tables, most = self.manager.block_tables(request), self.groups.most_blocks(request.max_total_tokens)
                held = [len(held_blocks([table])) for table in tables]
                assert all(count <= limit for count, limit in zip(held, most, strict=True))

    @invariant()
    def every_slot_is_counted_once_and_correctly(self) -> None:
        running = self.core.scheduler._batch.running
        for reason, lacks_memory in ((None, False), (WaitReason.SEATS, False), (WaitReason.MEMORY, True)):
            counted = slot_usage(running, self.manager, reason)
            assert counted._asdict() == slot_census(self.manager, running, lacks_memory)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "unfinished requests always progress"
        check_manager(self.manager)
        assert self.core.scheduler.is_idle, "all blocks of pool and swap space are free"
        for name, tokens in self.expected.items():
            answer = self.answers.get(name, [])
            assert answer == (tokens[: len(answer)] if name in self.aborted else tokens)
        self.check_events()

    def check_events(self) -> None:
        events = self.events.events
        arrived = [e.request_id for e in events if isinstance(e, RequestArrived)]
        finished = [e.request_id for e in events if isinstance(e, RequestFinished)]
        rejected = [e.request_id for e in events if isinstance(e, RequestRejected)]
        assert sorted(arrived) == sorted(finished) == sorted(self.expected)
        assert len(arrived) + len(rejected) == self.count
        assert {e.request_id: e.steps_waited for e in events if isinstance(e, RequestFinished)} == self.waited
        log = [e for e in events if isinstance(e, Step)]
        counted = sum(e.num_preemptions for e in events if isinstance(e, RequestFinished))
        # A preemption is reported with the next planned step; after aborts there may be none.
        assert all(set(e.swapped) <= set(e.preempted) for e in log)
        assert sum(len(e.preempted) for e in log) + len(self.core.scheduler._observer.preempted) == counted
        assert [e.step for e in log] == list(range(len(log)))
        num_slots = self.manager.num_blocks * self.manager.block_size
        assert all(e.token_states + e.reserved + e.internal + e.external + e.free == num_slots for e in log)
        assert sum(map(sum, (e.num_scheduled for e in log))) == sum(
            sum(out.num_scheduled_tokens.values()) for out in self.executor.outputs
        )


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(
    requests=st.lists(st.tuples(PROMPTS, st.integers(1, 10)), min_size=1, max_size=6),
    budget=st.integers(6, 40),
    blocks=st.integers(24, 60),
    caching=st.booleans(),
    steps_ahead=st.integers(0, 1),
    windows=WINDOWS,
    acceptance=st.sampled_from([None, 0.0, 0.6, 1.0]),
    checkpoints=CHECKPOINTS,
)
@settings(max_examples=80, deadline=None)
def test_tokens_do_not_depend_on_budget_pool_cache_or_other_requests(
    requests: list[tuple[list[int], int]],
    budget: int,
    blocks: int,
    caching: bool,
    steps_ahead: int,
    windows: tuple[int | None, ...],
    acceptance: float | None,
    checkpoints: tuple[int, int] | None,
) -> None:
    if checkpoints is not None:
        windows, acceptance = FULL, None
    core, _, _, _ = make_engine(
        num_blocks=blocks * len(windows),
        block_size=1,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        steps_ahead=steps_ahead,
        windows=windows,
        propose=None if acceptance is None else PartlyRightProposals(2, acceptance),
        checkpoints=None if checkpoints is None else CheckpointPlan(*checkpoints),
    )
    for index, (prompt, max_tokens) in enumerate(requests):
        core.add(make_request(str(index), prompt, max_tokens))
    answers: dict[str, list[int]] = {}
    while core.has_work:
        collect(core.step(), answers)
    assert answers == {str(i): expected_tokens(p, m) for i, (p, m) in enumerate(requests)}
