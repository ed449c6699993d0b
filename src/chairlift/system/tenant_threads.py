"""TenantThreads: threads on which the calls of tenants take turns."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")


class TenantThreads:
    """Calls functions on threads. The calls of one tenant start in the order in which they are submitted, and tenants
    take turns: before its next call, a tenant waits for at most one call of each other tenant once a thread is free.
    Safe to use from several threads.

    Args:
        name: the beginning of the names of the threads.
        per_tenant: the maximum number of threads that one tenant uses at a time.
    """

    def __init__(self, num_threads: int, name: str, per_tenant: int = 1) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._num_free = num_threads
        self._per_tenant = per_tenant
        self._is_shut_down = False
        self._lock = threading.Lock()
        self._num_running: Counter[str] = Counter()
        # The calls that wait, of each tenant in their order, and the tenants in the order of their turns.
        self._waiting: OrderedDict[str, OrderedDict[Future[Any], Callable[[], Any]]] = OrderedDict()

    def submit(
        self, tenant: str, function: Callable[..., Result], *arguments: object, is_next: bool = False
    ) -> Future[Result]:
        """Call a function in one of the next turns of a tenant. Cancelling the future of a call that waits gives up its
        place, and releases its arguments.

        Args:
            is_next: whether the call starts before the others of its tenant that wait.

        Raises:
            RuntimeError: the threads are shut down.
        """
        work: Future[Result] = Future()
        work.add_done_callback(partial(self._forget, tenant))
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("the threads are shut down")
            calls = self._waiting.setdefault(tenant, OrderedDict())
            calls[work] = partial(function, *arguments)
            calls.move_to_end(work, last=not is_next)
            self._start_calls()
        return work

    def shutdown(self) -> None:
        """Cancel the calls that wait, and end the threads after the calls that run."""
        with self._lock:
            self._is_shut_down = True
            waiting, self._waiting = self._waiting, OrderedDict()
        self._threads.shutdown(wait=False)
        for calls in waiting.values():
            for work in calls:
                work.cancel()

    def _start_calls(self) -> None:
        """Start the calls for which there are threads. The caller holds the lock."""
        while self._num_free:
            tenant = next((each for each in self._waiting if self._num_running[each] < self._per_tenant), None)
            if tenant is None:
                return
            work, call = self._waiting[tenant].popitem(last=False)
            self._end_turn(tenant)
            if work.set_running_or_notify_cancel():
                self._num_free -= 1
                self._num_running[tenant] += 1
                self._threads.submit(self._run, tenant, work, call)

    def _end_turn(self, tenant: str) -> None:
        """Put a tenant at the end of the order, or remove it if none of its calls waits."""
        if self._waiting.get(tenant):
            self._waiting.move_to_end(tenant)
        else:
            self._waiting.pop(tenant, None)

    def _run(self, tenant: str, work: Future[Any], call: Callable[[], Any]) -> None:
        try:
            work.set_result(call())
        except BaseException as error:
            work.set_exception(error)
        finally:
            del work, call  # The traceback of an error would keep them in memory.
            with self._lock:
                self._num_free += 1
                self._num_running[tenant] -= 1
                if self._num_running[tenant] == self._per_tenant - 1:  # It may start calls again, after the others.
                    self._end_turn(tenant)
                self._start_calls()

    def _forget(self, tenant: str, work: Future[Any]) -> None:
        with self._lock:
            calls = self._waiting.get(tenant, OrderedDict())
            calls.pop(work, None)
            if not calls:
                self._waiting.pop(tenant, None)
