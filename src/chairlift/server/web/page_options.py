"""The options of the live page, and the interface of the simulation that it can show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

from chairlift.events import EngineStarted, Event
from chairlift.observability.step_cost import CostLine
from chairlift.options import option

NO_SIMULATION: Final = "this server has no simulator: start it with `chairlift serve`"


class SimulatedRequest(Protocol):
    """A request to simulate. `arrival_time` is in seconds of the engine's clock."""

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    num_output_tokens: int


class StaticBatchingSimulation(Protocol):
    """Simulates static batching of requests on an engine with the limits and the step cost of the running one."""

    def __call__(
        self,
        engine: EngineStarted,
        cost: CostLine,
        requests: Sequence[SimulatedRequest],
        is_cancelled: Callable[[], bool],
    ) -> list[Event]:
        """The events of the simulated run, with times on the clock of the arrival times. It may end early with any
        error once `is_cancelled`."""
        ...


@dataclass(frozen=True, slots=True)
class PageOptions:
    """The options of the live page.

    Attributes:
        simulate_static: None if the live page cannot compare with static batching.
    """

    OPTION_GROUP: ClassVar = "Browsers"

    page_control: bool | None = option(
        None,
        "Allow the live page to send bursts of synthetic requests. Default: only without keys on the loopback.",
    )
    simulate_static: StaticBatchingSimulation | None = None
