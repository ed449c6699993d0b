"""Fair sharing over all replicas: each engine charges tenants for the service that other replicas gave them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from chairlift.cluster.usage_aggregator import SharedUsage, UsageExchange, exchange_periodically
from chairlift.core.queues.fair_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST

PERIOD_SECONDS: Final = 0.25
"""The counters of an engine lack what the other replicas have computed in this time."""


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


async def share_service(
    take: Callable[[], Mapping[str, float]], charge: Callable[[Mapping[str, float]], None], exchange: UsageExchange[str]
) -> None:
    """Exchange the service of tenants until the task is cancelled.

    While the exchange fails, tenants are charged for the service of this engine only, and a warning is logged.

    Args:
        take: returns the service of this engine since the last call.
        charge: charges the tenants of this engine; called once with {} when other engines serve no tenant any more.
    """
    await exchange_periodically(
        lambda: SharedUsage(take()),
        lambda usage: charge(usage.amounts),
        exchange,
        PERIOD_SECONDS,
        "fair sharing counts only this replica",
    )
