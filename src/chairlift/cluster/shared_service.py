"""Fair sharing over all replicas: each engine charges tenants for the service that other replicas gave them.

    replica --service since the last report--> ServiceBoard --service of the others--> replica --> FairPolicy

A report or an answer that is lost makes the shares less exact, and is not repeated: no service is charged twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from chairlift.core.scheduling_policies import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST

logger = logging.getLogger("chairlift")

PERIOD_SECONDS: Final = 0.25
"""The counters of an engine lack what the other replicas have computed in this time."""

SILENCE_SECONDS: Final = 600.0
"""A replica that has not reported for this time is forgotten."""

WARNING_SECONDS: Final = 30.0

ServiceExchange = Callable[[Mapping[str, float]], Awaitable[Mapping[str, float]]]
"""Reports the service of one replica, and returns that of the others since the last call, by tenant."""


class ServiceMeter:
    """Measures the service that one engine gives to tenants, in the unit of `FairPolicy`.

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


@dataclass(slots=True)
class _Reader:
    """The totals when a replica reported last."""

    time: float
    totals: dict[str, float] = field(default_factory=dict)


class ServiceBoard:
    """The sum of the service of all replicas. It runs once in a cluster; without its state, sharing starts anew."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}
        self._readers: dict[str, _Reader] = {}

    def exchange(self, replica_id: str, service: Mapping[str, float], now: float | None = None) -> dict[str, float]:
        """Add the service of a replica since its last report, and return that of all others since then.

        The first answer to a replica is empty: the past of the cluster is not charged to tenants of a new replica.
        """
        now = time.monotonic() if now is None else now
        for tenant, amount in service.items():
            self._totals[tenant] = self._totals.get(tenant, 0.0) + amount
        reader = self._readers.get(replica_id)
        remote = {} if reader is None else self._difference(reader.totals, service)
        self._readers[replica_id] = _Reader(now, dict(self._totals))
        self._readers = {name: each for name, each in self._readers.items() if now - each.time < SILENCE_SECONDS}
        return remote

    def _difference(self, before: Mapping[str, float], own: Mapping[str, float]) -> dict[str, float]:
        changes = {
            tenant: total - before.get(tenant, 0.0) - own.get(tenant, 0.0) for tenant, total in self._totals.items()
        }
        return {tenant: amount for tenant, amount in changes.items() if amount > 0}


async def share_service(
    take: Callable[[], Mapping[str, float]], charge: Callable[[Mapping[str, float]], None], exchange: ServiceExchange
) -> None:
    """Report the service of one engine, and charge that of the others, until the task is cancelled.

    Args:
        take: returns the service of this engine since the last call.
        charge: charges the tenants of this engine; called once with {} when other engines serve no tenant any more.
    """
    last_warning = -WARNING_SECONDS
    remote: Mapping[str, float] = {}
    while True:
        await asyncio.sleep(PERIOD_SECONDS)
        before, remote = remote, {}
        try:
            remote = await exchange(take())
        except Exception as error:
            if time.monotonic() - last_warning > WARNING_SECONDS:
                last_warning = time.monotonic()
                logger.warning("fair sharing counts only this replica, because the others do not answer: %r", error)
        if remote or before:
            charge(remote)
