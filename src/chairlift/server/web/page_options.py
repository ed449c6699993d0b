"""The options of the live page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

from chairlift.events import Event
from chairlift.options import option

NO_SIMULATION: Final = "this server has no simulator: start it with `chairlift serve`"


@dataclass(frozen=True, slots=True)
class PageOptions:
    """The options of the live page.

    Attributes:
        simulate_policy: simulates requests under another policy, as `lab.bench.policy_comparison`; None if the live
            page cannot compare policies.
    """

    OPTION_GROUP: ClassVar = "Browsers"

    page_control: bool | None = option(
        None,
        "Allow the live page to send bursts of synthetic requests. Default: only without keys on the loopback.",
    )
    simulate_policy: Callable[..., list[Event]] | None = None
