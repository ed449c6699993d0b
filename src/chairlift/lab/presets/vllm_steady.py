"""Batch sizes and KV memory in the steady state of a run: between its start and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from chairlift.errors import ConfigError
from chairlift.events import Event, Step
from chairlift.lab.presets.vllm_setting import Load, cost_model, sim_config
from chairlift.lab.sim.simulator import simulate

WARM_UP: Final = 0.1
"""The share of requests whose admission comes before the first step that counts."""

NUM_SEEDS: Final = 3

KINDS: Final = ("token_states", "reserved", "internal", "external", "free")


@dataclass(frozen=True, slots=True)
class Steady:
    """Means over the steps that count.

    Attributes:
        batch: running requests, every step counting alike; batch_by_time: by its duration.
        shares: of the pool in percent, by kind (see `core.kv.accounting`), every step counting alike.
        saved: slots that sharing saved, as a share in percent of those that would be held without it.
        requests_per_s: that ended, by the time that the steps took.
    """

    batch: float
    batch_by_time: float
    shares: dict[str, float]
    saved: float
    requests_per_s: float


class SteadyTally:
    """An event sink that adds up the steps from the admission of the first tenth of the requests until all but the
    last are admitted. If all came at once, the queue is not empty after any of these.

    The kinds of slots need no second look: the length of every request is forced, and is all that it asks for, so the
    live split into reserved and internal is the true one.
    """

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._admitted: set[str] = set()
        self._num_steps = self._num_rows = self._num_finished = self._num_saved = self._num_held = 0
        self._seconds = self._row_seconds = 0.0
        self._kinds = dict.fromkeys(KINDS, 0)

    def emit(self, event: Event) -> None:
        if isinstance(event, Step) and len(self._admitted) < self._num_requests:
            self._admitted.update(event.admitted)
            if WARM_UP * self._num_requests <= len(self._admitted) < self._num_requests:
                self._add(event)

    def _add(self, step: Step) -> None:
        seconds = step.time - step.scheduled_time
        self._num_steps += 1
        self._num_rows += step.num_running
        self._seconds += seconds
        self._row_seconds += seconds * step.num_running
        self._num_finished += len(step.finished)
        self._num_saved += step.saved
        self._num_held += step.token_states + step.reserved + step.internal
        for kind in KINDS:
            self._kinds[kind] += getattr(step, kind)

    def result(self) -> Steady:
        """Raises ConfigError if no step counts: there are too few requests."""
        if not self._num_steps:
            raise ConfigError(
                f"num_prompts={self._num_requests} is too few: all were admitted before a step could count. Give "
                f"more than fit the KV memory at once."
            )
        num_slots = sum(self._kinds.values())
        return Steady(
            batch=self._num_rows / self._num_steps,
            batch_by_time=self._row_seconds / self._seconds,
            shares={kind: 100 * slots / num_slots for kind, slots in self._kinds.items()},
            saved=100 * self._num_saved / (self._num_held + self._num_saved),
            requests_per_s=self._num_finished / self._seconds,
        )


def steady_state(kv: str, load: Load, rate: float | None = None) -> Steady:
    """One run under a policy; all requests at once if there is no rate (requests a second)."""
    requests = load.saturated() if rate is None else load.at_rate(rate)
    tally = SteadyTally(len(requests))
    simulate(requests, sim_config(kv), cost_model(), tally)
    return tally.result()


class Spread(NamedTuple):
    """A number from several seeds: its mean, and the largest distance of one from it."""

    mean: float
    off: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        mean = sum(values) / len(values)
        return cls(mean, max(abs(value - mean) for value in values))
