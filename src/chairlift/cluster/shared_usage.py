"""Limits of keys over all ingresses: each one reports the use of keys, and learns that of the others."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from chairlift.server.access.admission import AdmissionController
from chairlift.server.access.rate_limits import KeyUsage

logger = logging.getLogger("chairlift")

PERIOD_SECONDS: Final = 0.1
"""A key may exceed its rate by what it uses of other ingresses in this time."""

REPORT_SECONDS: Final = 10.0
"""The calls in progress of an ingress that has not reported for this time do not count any more."""

WARNING_SECONDS: Final = 30.0

Exchange = Callable[[str, Mapping[str, KeyUsage]], Awaitable[Mapping[str, KeyUsage]]]


class UsageBoard:
    """The reports of all ingresses. It runs once in a cluster; if it is lost, the next reports restore it, because they
    contain totals."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, Mapping[str, KeyUsage]]] = {}

    def exchange(self, ingress_id: str, usage: Mapping[str, KeyUsage]) -> dict[str, KeyUsage]:
        """Store the report of an ingress, and return the sum of those of all others by tenant."""
        now = time.monotonic()
        self._reports[ingress_id] = (now, usage)
        total: dict[str, KeyUsage] = {}
        for other, (reported, report) in self._reports.items():
            if other == ingress_id:
                continue
            for tenant, used in report.items():
                counted = used if now - reported < REPORT_SECONDS else KeyUsage(0, *_totals(used))
                total[tenant] = total.get(tenant, KeyUsage()) + counted
        return total


def _totals(usage: KeyUsage) -> tuple[float, float, float]:
    return usage.requests, usage.tokens, usage.cpu_seconds


async def share_usage(admission: AdmissionController, exchange: Exchange) -> None:
    """Report and learn the use of keys until the task is cancelled. Without an answer, the limits are those of this
    ingress, and a warning is logged."""
    ingress_id, last_warning = uuid.uuid4().hex, -WARNING_SECONDS
    while True:
        await asyncio.sleep(PERIOD_SECONDS)
        try:
            admission.set_remote_usage(await exchange(ingress_id, admission.usage()))
        except Exception as error:
            if time.monotonic() - last_warning > WARNING_SECONDS:
                last_warning = time.monotonic()
                logger.warning(
                    "the limits of keys count only this ingress, because the others do not answer: %r", error
                )
