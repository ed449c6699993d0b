"""Admission control: the bounded queue, limits and event streams of each key, deadlines and draining."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Final

from starlette.exceptions import HTTPException

from chairlift.counts import counted
from chairlift.errors import OverloadedError, RequestError
from chairlift.outputs import RequestOutput
from chairlift.server.access.access_options import ServerLimits
from chairlift.server.access.call import Call
from chairlift.server.access.keys import Key, KeyRing
from chairlift.server.access.rate_limits import KeyMeter
from chairlift.server.http.streaming import EventStream
from chairlift.slo import SLO

QUEUE_RETRY_SECONDS: Final = 1.0  # the `Retry-After` of a call for which the queue is full
KEY_CHECK_SECONDS: Final = 0.5  # until the stream of a key that was revoked has ended
MAX_EVENT_STREAMS: Final = 16  # of one key and path
DEADLINE_GRACE_SECONDS: Final = 1.0
"""Seconds that the engine has after a deadline to finish its step and report the expired request."""


class AdmissionController:
    """Admits calls within the limits of the server and of their keys, and counts the calls in progress.

    It must be used on the event loop only.

    Args:
        clock: a monotonic clock in seconds, so that setting the time of the machine moves no limit or deadline.

    Attributes:
        num_queued_requests, num_queued_tokens: the sequences that wait for their first token, and their tokens. A
            sequence is one answer to one prompt, and has the tokens of this prompt.
    """

    def __init__(
        self,
        limits: ServerLimits | None = None,
        keys: KeyRing | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or ServerLimits()
        self.clock = clock
        self.is_draining = False
        self.num_queued_requests = self.num_queued_tokens = 0
        self.num_calls = 0
        self.keys = keys or KeyRing()
        self._meters: dict[str, KeyMeter] = {}
        self._num_readers: Counter[tuple[str, str]] = Counter()

    def open_call(self, key: Key) -> Permit:
        """Count a call whose body has arrived and is not parsed yet. The caller must close the permit. Raises
        OverloadedError if the server drains, or a limit of the key rejects any call now."""
        if self.is_draining:
            message = "the server is shutting down: send the request to another server, or again later"
            raise OverloadedError(message, max(1.0, self.limits.drain_timeout), "shutting_down")
        meter = self.meter(key)
        meter.check_call()
        return Permit(self, key, meter)

    def take_usage(self) -> dict[tuple[str, str], float]:
        """Return what tenants have used of this server since the last call, by tenant and unit."""
        return {
            (tenant, unit): amount
            for tenant, meter in self._meters.items()
            for unit, amount in meter.take_usage().items()
        }

    def num_concurrent(self) -> dict[str, int]:
        """The number of sequences in progress on this server, by tenant."""
        return {tenant: meter.num_concurrent for tenant, meter in self._meters.items() if meter.num_concurrent}

    def charge_remote_usage(self, amounts: Mapping[tuple[str, str], float], num_concurrent: Mapping[str, int]) -> None:
        """Count what tenants use of other servers towards the limits of their keys.

        Args:
            amounts: what they have used since the last call, by tenant and unit.
            num_concurrent: their sequences in progress now, by tenant.
        """
        for tenant in {*num_concurrent, *(tenant for tenant, _ in amounts)}:
            if (key := self.keys.by_tenant.get(tenant)) is not None:
                self.meter(key)
        for tenant, meter in self._meters.items():
            meter.num_remote_concurrent = num_concurrent.get(tenant, 0)
        for (tenant, unit), amount in amounts.items():
            if tenant in self._meters:
                self._meters[tenant].charge(unit, amount)

    def open_events(self, call: Call, source: AsyncGenerator[bytes, None]) -> EventStream:
        """Create a response with the events of a source, which ends when its key is revoked or changed. Raises
        HTTPException if the key has the maximum number of streams of this path."""
        reader = (call.path, call.key.tenant)
        if self._num_readers[reader] >= MAX_EVENT_STREAMS:
            raise HTTPException(429, f"this key reads {MAX_EVENT_STREAMS} event streams, the maximum: close one")
        self._num_readers[reader] += 1
        events = self._while_valid(call.key, self.keys.identity(call.key), source)
        return EventStream(events, lambda: self._num_readers.subtract((reader,)))

    async def _while_valid(
        self, key: Key, identity: object, source: AsyncGenerator[bytes, None]
    ) -> AsyncIterator[bytes]:
        """The events until the source ends, or the key no longer has the identity."""
        async with aclosing(source):
            following = asyncio.ensure_future(anext(source, None))
            try:
                while True:
                    await asyncio.wait({following}, timeout=KEY_CHECK_SECONDS)
                    if self.keys.identity(key) != identity:
                        return
                    if following.done():
                        if (event := following.result()) is None:
                            return
                        yield event
                        following = asyncio.ensure_future(anext(source, None))
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    def count_request(self, key: Key) -> None:
        """Count a call that needs no engine, such as token counting, as a request without tokens. Raises
        OverloadedError if the key has used its requests per minute."""
        meter = self.meter(key)
        meter.check("requests", 1.0)
        meter.record("requests", 1.0)

    def meter(self, key: Key) -> KeyMeter:
        """The meter of a tenant with the limits that its key has now. Limits that were read again begin with this call;
        what earlier calls still generate is charged to the limits that they began with."""
        current = self.keys.current(key.tenant)
        if (meter := self._meters.get(key.tenant)) is None:
            meter = self._meters[key.tenant] = KeyMeter(current, self.clock)
        meter.set_limits(current)
        return meter

    def check_queue(self, num_requests: int, num_tokens: int) -> None:
        """Check that the queue has room for sequences; raises as `Permit.admit`."""
        bounds = (
            ("requests", self.num_queued_requests, num_requests, self.limits.max_queued_requests),
            ("tokens", self.num_queued_tokens, num_tokens, self.limits.max_queued_tokens),
        )
        for unit, _, more, limit in bounds:
            if more > limit:
                message = f"{more} {unit} in one call (prompts times answers), and max_queued_{unit}={limit}"
                raise RequestError(f"{message}: send fewer prompts, or ask for fewer answers", "prompt")
        for unit, waiting, more, limit in bounds:
            if waiting + more > limit:
                counts = f"{counted(self.num_queued_requests, 'waiting request')} with "
                counts += counted(self.num_queued_tokens, "prompt token")
                message = f"the queue is full: {counts}, and max_queued_{unit}={limit}; try again later"
                raise OverloadedError(message, QUEUE_RETRY_SECONDS, "queue_full")


class Permit:
    """A call in progress, which counts for its key and for the server until it is closed.

    As a context manager it is closed at the end of the block, unless the block has admitted the call.

    Attributes:
        tenant: the tenant of its key.
        is_admitted: whether its prompts may be sent to the engine. Then the following are known.
        cache_salt: the salt of its prefixes in the prefix cache; None if they are shared.
        deadline: the time by which it must end, in seconds of the clock of `AdmissionController`; None without one.
        slo: the SLO of its key, for a call without one.
    """

    def __init__(self, admission: AdmissionController, key: Key, meter: KeyMeter) -> None:
        self.tenant = key.tenant
        self.is_admitted = False
        self.cache_salt: str | None = None
        self.deadline: float | None = None
        self.slo: SLO | None = None
        self._admission, self._key, self._meter = admission, key, meter
        self._waiting: dict[tuple[int, int], int] = {}  # The tokens of sequences without output, by prompt and answer.
        self._num_sequences = 1  # Until the call is admitted it counts as one.
        self._num_prompts = 0
        self._is_pooling = False
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = True
        admission.num_calls += 1
        meter.num_concurrent += self._num_sequences

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_error: object) -> None:
        if not self.is_admitted:
            self.close()

    def admit(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_answers: int = 1,
        params_size: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        is_pooling: bool = False,
    ) -> None:
        """Admit the call to the queue, also if the server has begun to drain.

        Args:
            prompts: the token ids of each prompt.
            num_answers: the number of answers to each prompt, each of which is a sequence.
            params_size: the size of the sampling parameters in tokens, which are sent with each prompt.
            timeout: seconds from now to the deadline of the call.
            is_pooling: the prompts are texts of a call for vectors or scores, which counts as one sequence.
            cache_salt: the salt of the request body. The salt of the permit also separates keys: it begins with a
                length, so that different pairs have different salts.

        Raises:
            OverloadedError: the queue is full, or a limit of the key has been reached.
            RequestError: the call exceeds a limit even when the server is idle.
        """
        admission, num_tokens = self._admission, num_answers * sum(map(len, prompts))
        num_sequences = 1 if is_pooling else len(prompts) * num_answers
        self._is_pooling = is_pooling
        admission.check_queue(num_sequences, num_tokens + len(prompts) * params_size)
        meter = admission.meter(self._key)
        meter.check_concurrent(num_sequences, self._num_sequences)
        meter.check("requests", 1.0)
        meter.check("tokens", num_tokens)
        meter.record("requests", 1.0)
        meter.record("tokens", num_tokens)
        meter.num_concurrent += num_sequences - self._num_sequences
        self._num_sequences = num_sequences
        self._params_size = params_size
        self.is_admitted = True
        tenant = "" if admission.limits.share_prefix_cache else self.tenant
        if tenant or cache_salt is not None:
            self.cache_salt = f"{len(tenant)}:{tenant}:{cache_salt or ''}"
        self.deadline = None if timeout is None else admission.clock() + timeout
        self.slo = admission.keys.current(self.tenant).slo

    def track_prompt(self, num_prompt_tokens: int, num_answers: int = 1) -> Callable[[RequestOutput], None]:
        """Count the answers to a prompt that is sent to the engine as waiting, each until its first token.

        Returns:
            A function to which the caller must pass the outputs of the prompt. It counts their tokens.
        """
        prompt = self._num_prompts
        self._num_prompts += 1
        for answer in range(num_answers):
            self._waiting[prompt, answer] = num_prompt_tokens + (0 if answer else self._params_size)
        self._admission.num_queued_requests += num_answers * self._counts(prompt)
        self._admission.num_queued_tokens += num_prompt_tokens * num_answers + self._params_size

        def record_output(output: RequestOutput) -> None:
            for answer in output.outputs:
                self._meter.record("tokens", len(answer.token_ids))
                if answer.token_ids:
                    self._leave_queue((prompt, answer.index))

        return record_output

    def _leave_queue(self, sequence: tuple[int, int]) -> None:
        if (num_tokens := self._waiting.pop(sequence, None)) is not None:
            self._admission.num_queued_requests -= self._counts(sequence[0])
            self._admission.num_queued_tokens -= num_tokens

    def _counts(self, prompt: int) -> bool:
        """Whether the sequences of a prompt count. Of a call for vectors or scores only those of the first one do."""
        return prompt == 0 or not self._is_pooling

    def call_after_deadline(self, end: Callable[[], None]) -> None:
        """Call `end` soon after the deadline, unless the permit is closed before.

        The engine aborts requests at their deadline. This covers an engine that hangs or restarts.
        """
        if self.deadline is not None:
            seconds = self.deadline - self._admission.clock() + DEADLINE_GRACE_SECONDS
            self._timer = asyncio.get_running_loop().call_later(seconds, end)

    def close(self) -> None:
        """Stop counting the call. Further calls have no effect."""
        if self._timer is not None:
            self._timer.cancel()
        if self._is_open:
            self._is_open = False
            self._admission.num_calls -= 1
            self._meter.num_concurrent -= self._num_sequences
        for sequence in list(self._waiting):
            self._leave_queue(sequence)
