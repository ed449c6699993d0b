"""UsageAggregator: the use of shared resources by tenants, exchanged between the processes that serve them.

    sender --usage since its last answered report--> UsageAggregator --usage of the others since then--> sender

Each exchange may fail. A report without an answer is repeated with the same number and together with newer usage, so
that each amount is applied once, whether the report or its answer was lost. Three errors are accepted after failures:

- Amounts for which a sender has had no answer for `SENDER_TIMEOUT_SECONDS` are dropped. Charged at once after a longer
  outage, they would block tenants whose rate limits have recovered in the meantime.
- If the aggregator restarts, senders that have not received an amount yet are not charged for it: about one period.
- If the aggregator applies a report and restarts before the answer arrives, the report is charged twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

logger = logging.getLogger("chairlift")

SENDER_TIMEOUT_SECONDS: Final = 10.0
"""The aggregator removes a sender that has not reported for this time. Its next report counts as its first."""

WARNING_SECONDS: Final = 30.0
"""Shortest time between two warnings about failed exchanges."""

K = TypeVar("K", bound=Hashable)
"""What amounts are counted by: a tenant, or a tenant and a unit."""


@dataclass(frozen=True, slots=True)
class SharedUsage(Generic[K]):
    """The usage of one or several senders.

    Attributes:
        amounts: what was used in a period.
        num_concurrent: the calls in progress now, by tenant.
    """

    amounts: Mapping[K, float] = field(default_factory=dict)
    num_concurrent: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.amounts and not self.num_concurrent


UsageExchange = Callable[[str, int, SharedUsage[K]], Awaitable[SharedUsage[K]]]
"""Calls `UsageAggregator.exchange` in another process."""


@dataclass(slots=True)
class _SenderState(Generic[K]):
    """The state of a sender in the aggregator.

    Attributes:
        number: the number of its last report.
        reported: the amounts of all reports with this number, which are already in `pending` of the others.
        answered: the amounts of the others in the answers to these reports.
        pending: later amounts of the others.
    """

    number: int
    time: float = 0.0
    reported: Mapping[K, float] = field(default_factory=dict)
    answered: dict[K, float] = field(default_factory=dict)
    pending: dict[K, float] = field(default_factory=dict)
    num_concurrent: Mapping[str, int] = field(default_factory=dict)


class UsageAggregator(Generic[K]):
    """Returns to each sender what all other senders have used since its last answered report.

    One instance serves all senders. It keeps only amounts that are not answered yet: without its state, and for a new
    sender, sharing begins with the first report, and nothing of the past is charged.
    """

    def __init__(self) -> None:
        self._senders: dict[str, _SenderState[K]] = {}

    def exchange(self, sender_id: str, number: int, usage: SharedUsage[K], now: float | None = None) -> SharedUsage[K]:
        """Add the usage of a sender, and return that of all others.

        Args:
            number: the number of the report, which increases. A report with the number of the last one replaces it,
                and contains its amounts.
            now: the time in seconds of a monotonic clock; None: of the clock of this process.
        """
        now = time.monotonic() if now is None else now
        self._senders = {name: each for name, each in self._senders.items() if now - each.time < SENDER_TIMEOUT_SECONDS}
        sender = self._senders.setdefault(sender_id, _SenderState(number))
        if sender.number != number:
            sender.number, sender.reported, sender.answered = number, {}, {}
        new = {key: amount - sender.reported.get(key, 0.0) for key, amount in usage.amounts.items()}
        others = [each for each in self._senders.values() if each is not sender]
        num_concurrent: dict[str, int] = {}
        for other in others:
            _add(other.pending, new)
            _add(num_concurrent, other.num_concurrent)
        _add(sender.answered, sender.pending)
        sender.time, sender.reported, sender.pending = now, usage.amounts, {}
        sender.num_concurrent = usage.num_concurrent
        return SharedUsage(dict(sender.answered), num_concurrent)


N = TypeVar("N", int, float)


def _add(total: dict[K, N], more: Mapping[K, N]) -> None:
    """Add values to a total by key, without entries for zeros."""
    for key, value in more.items():
        if value:
            total[key] = total.get(key, 0) + value


class UsageSender(Generic[K]):
    """The reports of one sender.

    Args:
        now: the current time in seconds of a monotonic clock.

    Attributes:
        sender_id: identifies the sender among those of one aggregator.
        number: the number of the next report.
    """

    def __init__(self, sender_id: str, now: float) -> None:
        self.sender_id = sender_id
        self.number = 0
        self._unanswered: dict[K, float] = {}
        self._answered_at = now

    def report(self, amounts: Mapping[K, float], now: float) -> dict[K, float]:
        """The amounts of the next report: those since the last report, and those of reports without an answer."""
        if now - self._answered_at >= SENDER_TIMEOUT_SECONDS:
            self.number, self._unanswered = self.number + 1, {}
        _add(self._unanswered, amounts)
        return dict(self._unanswered)

    def acknowledge(self, now: float) -> None:
        """Record that the answer to the last report has arrived."""
        self.number, self._unanswered, self._answered_at = self.number + 1, {}, now


async def exchange_periodically(
    take: Callable[[], SharedUsage[K]],
    charge: Callable[[SharedUsage[K]], None],
    exchange: UsageExchange[K],
    period: float,
    failure: str,
) -> None:
    """Report the usage of this process, and charge that of the others, until the task is cancelled.

    Args:
        take: returns the usage since its last call.
        charge: charges tenants. It is called once with an empty usage when the others use nothing any more, and when
            an exchange fails.
        period: seconds between two exchanges.
        failure: the effect of a failed exchange, for the warning.
    """
    sender: UsageSender[K] = UsageSender(uuid.uuid4().hex, time.monotonic())
    last_warning = -WARNING_SECONDS
    remote: SharedUsage[K] = SharedUsage()
    while True:
        await asyncio.sleep(period)
        before, remote = remote, SharedUsage()
        usage = take()
        report = SharedUsage(sender.report(usage.amounts, time.monotonic()), usage.num_concurrent)
        try:
            remote = await exchange(sender.sender_id, sender.number, report)
            sender.acknowledge(time.monotonic())
        except Exception as error:
            if time.monotonic() - last_warning > WARNING_SECONDS:
                last_warning = time.monotonic()
                logger.warning("%s, because the usage aggregator does not answer: %r", failure, error)
        if not (remote.is_empty and before.is_empty):
            charge(remote)
