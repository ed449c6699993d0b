"""Limits of keys over all ingresses: each ingress charges keys for what they use of the others."""

from __future__ import annotations

from typing import Final

from chairlift.cluster.usage_aggregator import SharedUsage, UsageExchange, exchange_periodically
from chairlift.server.access.admission import AdmissionController

PERIOD_SECONDS: Final = 0.1
"""A key may exceed its rate by what it uses of other ingresses in this time."""


async def share_usage(admission: AdmissionController, exchange: UsageExchange[tuple[str, str]]) -> None:
    """Exchange the use of keys, by tenant and unit, until the task is cancelled.

    While the exchange fails, the limits are those of this ingress, and a warning is logged.
    """

    def take() -> SharedUsage[tuple[str, str]]:
        return SharedUsage(admission.take_usage(), admission.num_concurrent())

    def charge(usage: SharedUsage[tuple[str, str]]) -> None:
        admission.charge_remote_usage(usage.amounts, usage.num_concurrent)

    await exchange_periodically(take, charge, exchange, PERIOD_SECONDS, "the limits of keys count only this ingress")
