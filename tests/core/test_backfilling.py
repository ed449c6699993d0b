"""Requests pass a blocked head of the queue while it cannot use the free seats, and it does not starve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.config import SCHEDULING_POLICIES
from chairlift.core import backfilling
from chairlift.core.continuous_batching import ContinuousBatching, NextStep
from chairlift.core.engine_core import EngineCore
from chairlift.events import EventList, RequestWaiting, Step
from chairlift.request import Request, RequestStatus
from chairlift.sampling_params import SamplingParams
from support.fakes import make_engine, make_request

WIDTH = 10
MAX_STEPS = 6_000


def make_beams(name: str, max_tokens: int, width: int = WIDTH, **fields: Any) -> list[Request]:
    params = SamplingParams(n=width, use_beam_search=True, max_tokens=max_tokens)
    leader = f"{name}-0"
    names = [f"{name}-{index}" for index in range(width)]
    return [
        Request(each, [1, 2], params, max_tokens, leader_id=None if each == leader else leader, **fields)
        for each in names
    ]


class Run:
    """An engine with `WIDTH` seats, and the step in which each request was admitted for the first time."""

    def __init__(self, policy: str = "fcfs", **options: Any) -> None:
        options = {"num_blocks": 1000, "max_num_seqs": WIDTH, "max_num_batched_tokens": 64, **options}
        self.core: EngineCore
        self.events: EventList
        self.core, self.manager, _, self.events = make_engine(scheduling_policy=policy, **options)
        self.admitted: dict[str, int] = {}
        self.num_steps = 0

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.core.add(request)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.events.events.clear()
            self.core.step()
            for event in self.events.events:
                if isinstance(event, Step):
                    for request_id in event.admitted:
                        self.admitted.setdefault(request_id, self.num_steps)
            self.num_steps += 1

    def finish(self) -> None:
        while self.core.has_work:
            assert self.num_steps < MAX_STEPS
            self.step()


def block_with_beams(run: Run, long: int, names: Iterable[str] = ("a", "b")) -> None:
    """Run requests of `long` tokens, behind which a beam search with all seats has to wait."""
    run.add(*(make_request(name, [7], long) for name in names))
    run.step()
    run.add(*make_beams("beams", 5))
    run.step()
    assert run.core.scheduler.unfinished["beams-0"].status is RequestStatus.WAITING


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_short_requests_pass_a_search_that_lacks_seats_and_do_not_delay_it(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfilling, "WINDOW_STEPS", 0)
    run, alone = Run(policy), Run(policy)
    for each in (run, alone):
        block_with_beams(each, 60)
    arrived = {}
    # Under srpt each shorter request is the head itself, as long as it comes.
    for index in range(12):
        arrived[f"s{index}"] = run.num_steps
        run.add(make_request(f"s{index}", [8], 9))
        run.step(3)
    run.finish()
    alone.finish()
    assert all(run.admitted[name] == step for name, step in arrived.items()), "free seats are used at once"
    assert run.admitted["beams-0"] == alone.admitted["beams-0"]


@pytest.mark.parametrize("policy", [policy for policy in SCHEDULING_POLICIES if policy != "srpt"])
def test_a_request_that_might_not_end_in_time_passes_only_in_the_window(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfilling, "WINDOW_STEPS", 20)
    run = Run(policy)
    block_with_beams(run, 60)
    start = run.num_steps - 1
    while run.num_steps < start + 40:
        run.add(make_request(f"r{run.num_steps}", [8], 100, priority=0))
        run.step()
        run.core.abort(f"r{run.num_steps - 1}")  # so that seats stay free
    run.finish()
    passed = sorted(step for name, step in run.admitted.items() if name.startswith("r"))
    assert passed[0] == start + 1
    assert passed[-1] == start + 19
    assert run.admitted["beams-0"] - start <= 20 + 100


def test_a_less_important_request_does_not_delay_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("priority")
    run.add(make_request("a", [7], 60))
    run.step()
    run.add(*make_beams("beams", 5, priority=3))
    run.add(make_request("equal", [8], 100, priority=3), make_request("less", [8], 100, priority=4))
    run.add(make_request("short", [8], 9, priority=4))
    run.step()
    assert {"equal", "short"} <= run.admitted.keys()
    assert "less" not in run.admitted
    run.finish()
    assert run.admitted["less"] >= run.admitted["beams-0"]


def test_short_requests_pass_a_prompt_that_lacks_memory() -> None:
    run = Run(num_blocks=30)
    run.add(make_request("a", list(range(20)), 40))
    run.step()
    run.add(make_request("large", list(range(100, 204)), 5))
    run.step()
    arrived = {}
    for index in range(8):
        arrived[f"s{index}"] = run.num_steps
        run.add(make_request(f"s{index}", [8], 8))
        run.step(3)
    run.add(make_request("no-memory", [9] * 104, 3))
    run.finish()
    assert all(run.admitted[name] == step for name, step in arrived.items())
    assert run.admitted["large"] == 40, "it starts as soon as the running request has ended"
    assert run.admitted["no-memory"] > 40
    assert run.core.scheduler.is_idle


@pytest.mark.parametrize("options", [{"kv": "exact"}, {"kv": "max"}, {"batching": "static"}])
def test_baselines_remain_first_come_first_served(options: dict[str, Any]) -> None:
    run = Run(num_blocks=30, max_model_len=60, **options)
    run.add(make_request("a", list(range(20)), 40), make_request("b", list(range(20)), 39))
    run.step()
    run.add(make_request("large", [3] * 30, 25), make_request("small", [8], 8))
    run.finish()
    assert run.admitted["small"] >= run.admitted["large"]


def test_the_head_has_the_reason_of_its_wait_while_others_pass() -> None:
    run = Run()
    block_with_beams(run, 30)
    run.add(make_request("s", [8], 5))
    run.step()
    event = next(event for event in run.events.events if isinstance(event, Step))
    assert (event.head_id, event.wait_reason) == ("beams-0", "seats")
    assert event.admitted == ["s"]
    assert not [e for e in run.events.events if isinstance(e, RequestWaiting)], "no request begins to wait"
    leader = run.core.scheduler.unfinished["beams-0"]
    run.finish()
    assert leader.meter.steps_waited == {"seats": run.admitted["beams-0"] - 1}


def test_the_cost_of_a_step_does_not_grow_with_the_requests_that_cannot_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backfilling, "WINDOW_STEPS", 0)
    compared: Counter[str] = Counter()
    max_steps = backfilling._max_steps

    def counted(request: Request) -> int:
        compared[request.request_id[0]] += 1
        return max_steps(request)

    monkeypatch.setattr(backfilling, "_max_steps", counted)
    run = Run()
    block_with_beams(run, 60)
    run.add(*(make_request(f"r{index}", [8], 200) for index in range(1000)))
    run.step()
    assert compared["r"] == backfilling.MAX_COMPARED


LOAD = st.lists(
    st.one_of(
        st.tuples(st.just("plain"), st.integers(0, 20), st.integers(1, 12), st.integers(1, 30)),
        st.tuples(st.just("beams"), st.integers(0, 20), st.integers(2, 6), st.integers(1, 8)),
    ),
    min_size=2,
    max_size=20,
)
NUM_SEATS, LONGEST_OUTPUT, PROMPT_STEPS = 6, 30, 15


@given(
    load=LOAD,
    window=st.sampled_from([0, 5]),
    num_tenants=st.integers(1, 3),
    policy=st.sampled_from(SCHEDULING_POLICIES),
)
@settings(max_examples=80, deadline=None)
def test_no_request_that_fits_waits_longer_than_the_bound(
    load: list[tuple[str, int, int, int]], window: int, num_tenants: int, policy: str
) -> None:
    """With memory for all, a request with free seats waits only if its longest output might end after the head could
    start, and the head waits for the window and the longest output of a running request."""
    arrivals: dict[int, list[Request]] = {}
    for index, (kind, time, size, max_tokens) in enumerate(load):
        tenant = "abc"[index % num_tenants]
        plain = [make_request(f"r{index}", [index] * size, max_tokens, tenant=tenant)]
        requests = plain if kind == "plain" else make_beams(f"b{index}", max_tokens, size, tenant=tenant)
        arrivals.setdefault(time, []).extend(requests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backfilling, "WINDOW_STEPS", window)
        run = Run(policy, max_num_seqs=NUM_SEATS, num_blocks=2000, max_num_batched_tokens=NUM_SEATS + 16)
        check = BoundCheck(window)
        fill = ContinuousBatching.fill

        def checked_fill(batch: ContinuousBatching, plan: NextStep) -> None:
            first = batch.waiting.peek()
            fill(batch, plan)
            check(batch, first)

        patch.setattr(ContinuousBatching, "fill", checked_fill)
        while arrivals or run.core.has_work:
            run.add(*arrivals.pop(run.num_steps, ()))
            run.step()
            assert run.num_steps < MAX_STEPS


class BoundCheck:
    """Checks the waiting requests when a step is planned, and counts the steps in which the same head was blocked."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._head: Request | None = None
        self._num_steps = 0

    def __call__(self, batch: ContinuousBatching, first: Request | None) -> None:
        """Check the batch after a step is planned, which began with the head `first`."""
        head = batch.waiting.peek()
        is_same, self._head = head is first is self._head, head
        self._num_steps = self._num_steps + 1 if is_same else 1
        if head is None or head.num_pending_tokens:
            return
        if head is not first and not batch.waiting.has_constant_keys:
            return  # An admission has changed the order, and the new head is tried in the next step.
        assert head.num_seats > batch.num_free_seats, "the head does not fit"
        if head.sampling_params.n > 1:
            assert self._num_steps <= self._window + LONGEST_OUTPUT + PROMPT_STEPS
        start = next(time for time in range(1000) if self._free_seats_after(batch, time) >= head.num_seats)
        num_uncomputed = sum(max(0, each.num_prompt_tokens - each.num_computed_tokens) for each in batch.running)
        for request in batch.waiting.in_order():
            if request is not head and request.num_seats <= batch.num_free_seats:
                num_chunks = -(-(num_uncomputed + request.num_tokens) // 16)
                assert num_chunks + request.end_total_tokens - request.num_tokens > start, "it could have passed"

    @staticmethod
    def _free_seats_after(batch: ContinuousBatching, time: int) -> int:
        ended = [each for each in batch.running if each.end_total_tokens - each.num_tokens <= time]
        return batch.num_free_seats + sum(each.num_seats for each in ended)
