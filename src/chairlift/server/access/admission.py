"""Who is let in: a bounded queue, limits of each key, deadlines, and nobody any more once the server drains."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift.clock import format_duration
from chairlift.errors import DeadlineError, OverloadedError, RequestError
from chairlift.outputs import RequestOutput
from chairlift.sampling_params import SamplingParams
from chairlift.server.access.keys import KeyInfo, KeyLimits, KeyRing
from chairlift.server.access.rate_limits import KeyMeter
from chairlift.server.access.server_limits import ServerLimits
from chairlift.server.access.service_rate import ServiceRate

DEADLINE_GRACE_SECONDS = 1.0
"""After a deadline, for the engine to end the step that it is in and tell of it."""


@dataclass(slots=True)
class WaitingPrompts:
    """Prompts that wait for their first token."""

    num_requests: int = 0
    num_tokens: int = 0

    def add(self, num_requests: int, num_tokens: int) -> None:
        self.num_requests += num_requests
        self.num_tokens += num_tokens


class AdmissionController:
    """Counts what was taken in and is not answered yet. On the event loop only.

    Args:
        is_fair: the engine serves tenants in turn, so that nobody waits for more than others' equal share.
        clock: seconds that never jump: the machine may set its time, and no limit or deadline moves.
    """

    def __init__(
        self,
        limits: ServerLimits | None = None,
        keys: KeyRing | None = None,
        *,
        is_fair: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or ServerLimits()
        self.clock = clock
        self.is_draining = False
        self.service_rate = ServiceRate()
        self.queue = WaitingPrompts()
        self.num_calls = 0
        self._is_fair = is_fair
        self._keys = keys or KeyRing()
        self._meters: dict[str, KeyMeter] = {}
        self._queues: dict[str, WaitingPrompts] = {}
        self.stop_preparation: Callable[[str], None] = lambda _message: None

    def admit(
        self,
        key: KeyInfo,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        timeout: float | None = None,
        cache_salt: str | None = None,
        slot: CallSlot | None = None,
    ) -> Permit:
        """Let a call in, whose prompts have these tokens; somebody has to close the permit.

        Args:
            timeout: seconds until nobody wants the answer any more.
            cache_salt: as the caller gave it; the permit's also tells keys apart.
            slot: what the call has held while it was prepared; the permit takes its place. A call with a slot was
                accepted before the server began to drain, if it drains.

        Raises:
            OverloadedError: too much waits, the key has had its share for now, or the server drains.
            DeadlineError: `timeout` cannot be met.
            RequestError: `timeout` is not a time, or the key may never ask for so much.
        """
        now = self.clock()
        num_tokens = sum(map(len, prompts))
        if timeout is not None and not 0 < timeout < math.inf:
            raise RequestError(f"timeout must be a number of seconds > 0, got {timeout}", "timeout")
        self._take_over(slot)
        self._check_queue(len(prompts), num_tokens)
        meter = self._meter(key, now)
        meter.check(num_tokens, now)
        self._check_deadline(key, len(prompts), num_tokens, params, timeout)
        meter.start_call(num_tokens, now)
        self.num_calls += 1
        deadline = None if timeout is None else now + timeout
        return Permit(self, key.tenant, self._salt(key, cache_salt), deadline, meter)

    def check_token_rate(self, key: KeyInfo) -> None:
        """Refuse, before its prompts are tokenized, a call that `enter` would not let in whatever it asks.

        Raises:
            OverloadedError: as `enter`.
        """
        self._meter(key, self.clock()).check_tokens(0, self.clock())

    def reserve_slot(self, key: KeyInfo) -> CallSlot:
        """Count a call whose body has arrived, before it is parsed. The caller must release the slot.

        Raises:
            OverloadedError: the server drains, or the key may make no call now, whatever the body contains.
        """
        self._check_draining()
        now = self.clock()
        meter = self._meter(key, now)
        meter.check_cpu_seconds(now)
        meter.check_call(now)
        return CallSlot(self, meter)

    def _take_over(self, slot: CallSlot | None) -> None:
        if slot is None:
            self._check_draining()
        else:
            slot.release()

    def record_cpu_seconds(self, tenant: str, seconds: float) -> None:
        """Account for CPU time that a tenant's call took outside of the engine."""
        if tenant in self._meters:
            self._meters[tenant].record_cpu_seconds(seconds, self.clock())

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time outside of the engine so far, by tenant."""
        return {tenant: meter.total_cpu_seconds for tenant, meter in self._meters.items()}

    @contextlib.contextmanager
    def admit_utility_call(self, key: KeyInfo, slot: CallSlot | None = None) -> Iterator[None]:
        """A call that asks nothing of the engine, such as for token counts: one of the key's requests all the same. A
        key that has no tokens left may make it.

        Raises:
            OverloadedError: as `enter`.
        """
        self._take_over(slot)
        now = self.clock()
        meter = self._meter(key, now)
        meter.check_call(now)
        meter.start_call(0, now)
        self.num_calls += 1
        try:
            yield
        finally:
            meter.end_call()
            self.num_calls -= 1

    def admit_query(self, key: KeyInfo) -> None:
        """A question about other calls, such as why they wait, which takes time to answer. Who is at the limit of calls
        at once may ask it, and so may anybody while the server drains: it is what they would want to know then.

        Raises:
            OverloadedError: the key has had its requests for now; an admin's key always may.
        """
        if not key.is_admin:
            now = self.clock()
            self._meter(key, now).take_query(now)

    def _check_draining(self) -> None:
        if self.is_draining:
            message = "the server is shutting down: send this to another one, or again when it is back"
            raise OverloadedError(message, max(1.0, self.limits.drain_timeout), "shutting_down")

    def _meter(self, key: KeyInfo, now: float) -> KeyMeter:
        if key.tenant not in self._meters:
            known = self._keys.by_tenant.get(key.tenant)
            self._meters[key.tenant] = KeyMeter(key.name, KeyLimits() if known is None else known.limits, now)
        return self._meters[key.tenant]

    def _salt(self, key: KeyInfo, cache_salt: str | None) -> str | None:
        """Lengths first, so that no two pairs give the same."""
        tenant = "" if self.limits.share_prefix_cache else key.tenant
        return None if not tenant and cache_salt is None else f"{len(tenant)}:{tenant}:{cache_salt or ''}"

    def _check_queue(self, num_requests: int, num_tokens: int) -> None:
        queue, limits = self.queue, self.limits
        bounds = (
            ("requests", queue.num_requests, num_requests, limits.max_queued_requests),
            ("tokens", queue.num_tokens, num_tokens, limits.max_queued_tokens),
        )
        for unit, _, more, limit in bounds:
            if more > limit:
                raise RequestError(f"{more} {unit} in one call, and max_queued_{unit}={limit}: send less", "prompt")
        for unit, waiting, more, limit in bounds:
            if waiting + more > limit:
                raise self._queue_full_error(f"max_queued_{unit}={limit}", (waiting + more - limit) / waiting)

    def _queue_full_error(self, bound: str, share: float) -> OverloadedError:
        """This share of it has to go first."""
        queue = self.queue
        seconds = self.service_rate.seconds_until_first_token(
            math.ceil(queue.num_requests * share), math.ceil(queue.num_tokens * share)
        )
        retry_after = 1.0 if seconds is None else max(1.0, seconds)
        waiting = f"{queue.num_requests} requests with {queue.num_tokens} prompt tokens wait"
        message = f"the queue is full: {waiting}, and {bound}; try again in about {retry_after:.0f} s"
        return OverloadedError(message, retry_after, "queue_full")

    def _check_deadline(
        self, key: KeyInfo, num_requests: int, num_tokens: int, params: SamplingParams, timeout: float | None
    ) -> None:
        if timeout is None:
            return
        ahead = self._prompts_ahead(key)
        wait = self.service_rate.seconds_until_first_token(
            ahead.num_requests + num_requests, ahead.num_tokens + num_tokens
        )
        least = params.max_tokens if params.ignore_eos and not params.stop else params.min_tokens
        needed = (wait or 0.0) + self.service_rate.seconds_for_output(least or 0)
        if needed > timeout:
            raise DeadlineError(
                f"timeout={timeout:g} s cannot be met: it would take about {format_duration(needed)}, "
                f"behind {ahead.num_requests} requests with {ahead.num_tokens} prompt tokens"
            )

    def _prompts_ahead(self, key: KeyInfo) -> WaitingPrompts:
        """What waits before a new request of this key: under fair scheduling no more of anybody else's than of its
        own."""
        if not self._is_fair:
            return self.queue
        own = self._queues.get(key.tenant, WaitingPrompts())
        others = [queue for tenant, queue in self._queues.items() if tenant != key.tenant]
        return WaitingPrompts(
            own.num_requests + sum(min(other.num_requests, own.num_requests) for other in others),
            own.num_tokens + sum(min(other.num_tokens, own.num_tokens) for other in others),
        )

    def add_waiting(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        """So many more wait for their first token (fewer, if negative)."""
        self.queue.add(num_requests, num_tokens)
        own = self._queues.setdefault(tenant, WaitingPrompts())
        own.add(num_requests, num_tokens)
        if not own.num_requests:
            del self._queues[tenant]
        self.service_rate.set_waiting(self.queue.num_requests > 0, self.clock())


class CallSlot:
    """A call that is being prepared: it counts as one of the calls in progress, of its key and of the server."""

    def __init__(self, admission: AdmissionController, meter: KeyMeter) -> None:
        self._admission = admission
        self._meter = meter
        self._is_held = True
        admission.num_calls += 1
        meter.num_concurrent += 1

    def release(self) -> None:
        """End the count; may be called again."""
        if self._is_held:
            self._is_held = False
            self._admission.num_calls -= 1
            self._meter.end_call()


@dataclass(slots=True, eq=False)
class Permit:
    """A call that was let in: what its generations are started with, and what is counted of them.

    Attributes:
        deadline: seconds of the admission's clock, which is the engine's.
    """

    _admission: AdmissionController
    tenant: str
    cache_salt: str | None
    deadline: float | None
    _meter: KeyMeter
    _is_open: bool = True
    _entries: list[QueuedPrompt] = field(default_factory=list)
    _timer: asyncio.TimerHandle | None = None

    def track_prompt(self, num_prompt_tokens: int) -> QueuedPrompt:
        """One of its prompts is given to the engine; its generation tells what comes of it."""
        entry = QueuedPrompt(self._admission, self.tenant, num_prompt_tokens, self._meter)
        self._entries.append(entry)
        return entry

    def call_after_deadline(self, end: Callable[[], None]) -> None:
        """Call `end` if the deadline passes and the engine, whose it is to keep, says nothing: it may hang, or be
        about to start again."""
        if self.deadline is not None:
            seconds = self.deadline - self._admission.clock() + DEADLINE_GRACE_SECONDS
            self._timer = asyncio.get_running_loop().call_later(seconds, end)

    def close(self) -> None:
        """The call is over; once or more often."""
        if self._timer is not None:
            self._timer.cancel()
        if self._is_open:
            self._is_open = False
            self._meter.end_call()
            self._admission.num_calls -= 1
            for entry in self._entries:
                entry.close()


class QueuedPrompt:
    """One prompt in the queue, until its first token or its end."""

    def __init__(self, admission: AdmissionController, tenant: str, num_prompt_tokens: int, meter: KeyMeter) -> None:
        self._admission = admission
        self._tenant = tenant
        self._num_prompt_tokens = num_prompt_tokens
        self._meter = meter
        self._first_token_at: float | None = None
        self._num_tokens = 0  # of the first answer, if there are several
        self._is_waiting = True
        admission.add_waiting(tenant, 1, num_prompt_tokens)

    def record_output(self, output: RequestOutput) -> None:
        """Something new of its answers."""
        num_new = sum(len(answer.token_ids) for answer in output.outputs)
        now = self._admission.clock()
        self._meter.record_tokens(num_new, now)
        self._num_tokens += sum(len(answer.token_ids) for answer in output.outputs if answer.index == 0)
        if self._first_token_at is None and num_new:
            self._first_token_at = now
            self._admission.service_rate.record_first_token(self._num_prompt_tokens)
            self._leave_queue()
        if output.finished and self._first_token_at is not None:
            self._admission.service_rate.record_answer(now - self._first_token_at, self._num_tokens)

    def _leave_queue(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._admission.add_waiting(self._tenant, -1, -self._num_prompt_tokens)

    def close(self) -> None:
        """Nobody waits for it any more, or it is done."""
        self._leave_queue()


class AdmissionMiddleware:
    """Sets `request.state.admission`."""

    def __init__(self, app: ASGIApp, admission: AdmissionController) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["admission"] = self._admission
        await self._app(scope, receive, send)
