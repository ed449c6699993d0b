"""UsageAggregator: the use of shared resources by tenants, exchanged between the processes that serve them.

    sender --usage since its last report--> UsageAggregator --usage of the others since then--> sender

An exchange that fails loses the amounts of its period: the others, or the sender, are not charged for them. Nothing is
charged twice, and nothing of the past: a sender that joins, and all senders after a restart of the aggregator, are
charged from their first report on.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from chairlift.core.queues.fair_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST

logger = logging.getLogger("chairlift")

SENDER_TIMEOUT_SECONDS: Final = 10.0
"""The aggregator removes a sender that has not reported for this time. Its next report counts as its first, because
amounts of a long outage, charged at once, would block tenants whose rate limits have recovered in the meantime."""

SERVICE_PERIOD_SECONDS: Final = 0.25
"""The counters of fair sharing of an engine lack what the other replicas have computed in this time."""

WARNING_SECONDS: Final = 30.0
"""Shortest time between two warnings about failed exchanges."""

K = TypeVar("K", bound=Hashable)
"""What amounts are counted by: a tenant, or a tenant and a unit."""

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class SharedUsage(Generic[K]):
    """The usage of one or several senders.

    Attributes:
        amounts: what was used in a period.
        num_concurrent: the calls in progress now, by tenant.
    """

    amounts: Mapping[K, float] = field(default_factory=dict)
    num_concurrent: Mapping[str, int] = field(default_factory=dict)


UsageExchange = Callable[[str, SharedUsage[K]], Awaitable[SharedUsage[K]]]
"""Calls `UsageAggregator.exchange` in another process."""


@dataclass(slots=True)
class _SenderState(Generic[K]):
    """The time and the calls of the last report of a sender, and the amounts of the others since then."""

    time: float = 0.0
    num_concurrent: Mapping[str, int] = field(default_factory=dict)
    pending: dict[K, float] = field(default_factory=dict)


class UsageAggregator(Generic[K]):
    """Returns to each sender what all other senders have used since its last report. One instance serves all."""

    def __init__(self) -> None:
        self._senders: dict[str, _SenderState[K]] = {}

    def exchange(self, sender_id: str, usage: SharedUsage[K], now: float | None = None) -> SharedUsage[K]:
        """Add the usage of a sender, and return the usage of all others.

        Args:
            now: the time in seconds of a monotonic clock; None: of the clock of this process.
        """
        now = time.monotonic() if now is None else now
        self._senders = {name: each for name, each in self._senders.items() if now - each.time < SENDER_TIMEOUT_SECONDS}
        sender = self._senders.setdefault(sender_id, _SenderState())
        amounts, sender.pending = sender.pending, {}
        sender.time, sender.num_concurrent = now, usage.num_concurrent
        num_concurrent: dict[str, int] = {}
        for other in self._senders.values():
            if other is not sender:
                _add(other.pending, usage.amounts)
                _add(num_concurrent, other.num_concurrent)
        return SharedUsage(amounts, num_concurrent)


class ServiceMeter:
    """Measures the service that one engine gives to tenants, in the unit of `FairQueue`.

    Prompt tokens count when the first output arrives, because an output has their number.
    """

    def __init__(self) -> None:
        self._service: dict[str, float] = {}

    def add(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Add computed prompt tokens and output tokens."""
        service = PROMPT_TOKEN_COST * num_prompt_tokens + OUTPUT_TOKEN_COST * num_output_tokens
        self._service[tenant] = self._service.get(tenant, 0.0) + service

    def total(self) -> dict[str, float]:
        """The service by tenant since the last `take`, without resetting it."""
        return dict(self._service)

    def take(self) -> dict[str, float]:
        """The service by tenant since the last call."""
        service, self._service = self._service, {}
        return service


def _add(total: dict[K, N], more: Mapping[K, N]) -> None:
    """Add values to a total by key, without entries for zeros."""
    for key, value in more.items():
        if value:
            total[key] = total.get(key, 0) + value


async def exchange_periodically(
    take: Callable[[], SharedUsage[K]],
    charge: Callable[[SharedUsage[K]], None],
    exchange: UsageExchange[K],
    period: float,
    failure: str,
) -> None:
    """Report the usage of this process, and charge the usage of the others, until the task is cancelled.

    Args:
        take: returns the usage since its last call.
        charge: charges tenants. It is called once with an empty usage when the others use nothing any more, and when
            an exchange fails.
        period: seconds between two exchanges.
        failure: the effect of a failed exchange, for the warning.
    """
    sender_id, last_warning = uuid.uuid4().hex, -WARNING_SECONDS
    nothing: SharedUsage[K] = SharedUsage()
    remote = nothing
    while True:
        await asyncio.sleep(period)
        before, remote = remote, nothing
        try:
            remote = await exchange(sender_id, take())
        except Exception as error:
            if time.monotonic() - last_warning > WARNING_SECONDS:
                last_warning = time.monotonic()
                logger.warning("%s, because the usage aggregator does not answer: %r", failure, error)
        if remote != nothing or before != nothing:
            charge(remote)
