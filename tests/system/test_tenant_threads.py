from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.system.tenant_threads import TenantThreads
from support.waiting import AMPLE_SECONDS, wait_for


class FakeThreads:
    """Threads whose calls end when the test ends them."""

    def __init__(self) -> None:
        self.running: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def submit(self, function: Callable[..., None], *arguments: Any) -> None:
        self.running.append((function, arguments))

    def end(self, index: int) -> None:
        function, arguments = self.running.pop(index)
        function(*arguments)

    def tenants(self) -> list[str]:
        return [arguments[0] for _function, arguments in self.running]


OPERATIONS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from("aab"), st.booleans()),
    st.tuples(st.just("submit"), st.sampled_from("abcd"), st.booleans()),
    st.tuples(st.just("end"), st.integers(0, 5), st.none()),
    st.tuples(st.just("cancel"), st.integers(0, 30), st.none()),
)


@settings(max_examples=200)
@given(st.lists(OPERATIONS, min_size=5, max_size=60), st.integers(1, 4), st.integers(1, 3))
def test_tenants_take_turns(operations: list[tuple[str, Any, Any]], num_threads: int, per_tenant: int) -> None:
    """No thread is idle while a tenant may use it, a tenant keeps to its order, and while it may start a call, each
    other tenant starts at most one before it."""
    turns, threads = TenantThreads(num_threads, "test", per_tenant), FakeThreads()
    turns._threads = threads  # type: ignore[assignment]
    expected: dict[str, list[Future[None]]] = {tenant: [] for tenant in "abcd"}
    started: list[tuple[str, Future[None]]] = []
    passed: dict[str, Counter[str]] = {}

    def eligible() -> set[str]:
        running = Counter(threads.tenants())
        return {tenant for tenant, works in expected.items() if works and running[tenant] < per_tenant}

    for kind, value, is_next in operations:
        num_known, waited = len(threads.running), eligible()
        if kind == "submit":
            work = turns.submit(value, lambda: None, is_next=is_next)
            expected[value].insert(0 if is_next else len(expected[value]), work)
        elif kind == "end" and threads.running:
            threads.end(value % len(threads.running))
            num_known -= 1
        elif kind == "cancel" and (works := [work for works in expected.values() for work in works]):
            work = works[value % len(works)]
            assert work.cancel()
            for works in expected.values():
                if work in works:
                    works.remove(work)
        for _function, (tenant, work, _call) in threads.running[num_known:]:
            assert work is expected[tenant].pop(0), "the calls of a tenant start in their order"
            started.append((tenant, work))
            passed.pop(tenant, None)
            for other in waited - {tenant}:
                passed.setdefault(other, Counter())[tenant] += 1
        now = eligible()
        assert not now or len(threads.running) == num_threads, "a thread is idle"
        assert len(threads.running) <= num_threads
        assert max(Counter(threads.tenants()).values(), default=0) <= per_tenant
        passed = {tenant: counts for tenant, counts in passed.items() if tenant in now}
        assert all(count <= 1 for counts in passed.values() for count in counts.values())
    while threads.running:
        threads.end(0)
    assert not turns._waiting
    assert +turns._num_running == Counter()
    assert all(work.done() for _tenant, work in started)


def test_a_tenant_whose_call_ends_waits_for_the_others() -> None:
    turns, threads = TenantThreads(1, "test"), FakeThreads()
    turns._threads = threads  # type: ignore[assignment]
    for tenant in "aaabbc":
        turns.submit(tenant, lambda: None)
    order = ""
    while threads.running:
        order += threads.tenants()[0]
        threads.end(0)
    assert order == "abcaba"


def test_results_and_errors_are_those_of_the_calls() -> None:
    turns = TenantThreads(2, "test")
    assert turns.submit("a", divmod, 7, 2).result(AMPLE_SECONDS) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        turns.submit("a", divmod, 7, 0).result(AMPLE_SECONDS)
    turns.shutdown()


class Argument:
    pass


def test_arguments_are_released_when_a_call_ends_or_is_cancelled() -> None:
    turns, release = TenantThreads(1, "test"), threading.Event()

    def fail(argument: Argument) -> None:
        argument.value = release.wait(AMPLE_SECONDS)  # type: ignore[attr-defined]
        raise ValueError

    gc.collect()
    gc.disable()
    try:
        arguments = [Argument(), Argument()]
        known = [weakref.ref(argument) for argument in arguments]
        running, waiting = (turns.submit("a", fail, argument) for argument in arguments)
        arguments.clear()
        assert waiting.cancel()
        assert known[1]() is None
        release.set()
        assert isinstance(running.exception(AMPLE_SECONDS), ValueError)
        running.exception().with_traceback(None)  # type: ignore[union-attr]
        wait_for(lambda: known[0]() is None)
    finally:
        gc.enable()
        turns.shutdown()


def test_after_a_shutdown_no_call_starts() -> None:
    turns, release = TenantThreads(1, "test"), threading.Event()
    running = turns.submit("a", release.wait, AMPLE_SECONDS)
    waiting = [turns.submit(tenant, release.wait) for tenant in "aab"]
    turns.shutdown()
    assert all(work.cancelled() for work in waiting)
    with pytest.raises(RuntimeError, match="shut down"):
        turns.submit("a", release.wait)
    release.set()
    assert running.result(AMPLE_SECONDS) is True
