"""What a front end needs of an engine, wherever that runs: in a thread of this process, or in one of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from chairlift.config import SchedulerConfig
from chairlift.engine.event_hub import EventHub
from chairlift.engine.input_processor import InputProcessor, NoTokenizer
from chairlift.engine.process.commands import Command
from chairlift.errors import EngineDeadError, EngineUnavailableError
from chairlift.events import EngineStarted
from chairlift.loading.text.tokenizer import Tokenizer
from chairlift.models.config import ModelConfig
from chairlift.outputs import EngineCoreOutput
from chairlift.worker.kv_cache_plan import KVCachePlan

EngineState = Literal["starting", "running", "restarting", "cannot_restart", "dead"]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How an engine fares.

    Attributes:
        state: "restarting": requests that had begun were lost, others and new ones wait; "cannot_restart": starts have
            failed for so long that requests end with EngineUnavailableError, and starts go on; "dead": for good.
        restarts: how often it was started again.
        seconds_since_step: since the last step ended, or since the engine was ready if there was none.
        num_unfinished: prompts that are being answered.
        seconds_stalled: without a step while something was to be done; 0 if nothing is.
        last_failure: why it died when it last did; None if it never has.
    """

    state: EngineState
    restarts: int
    seconds_since_step: float
    num_unfinished: int
    seconds_stalled: float = 0.0
    last_failure: str | None = None


class ServedEngine(Protocol):
    """What the front end knows of an engine, and what it makes and reads requests with."""

    @property
    def tokenizer(self) -> Tokenizer | NoTokenizer: ...
    @property
    def input_processor(self) -> InputProcessor: ...
    @property
    def model_config(self) -> ModelConfig: ...
    @property
    def scheduler_config(self) -> SchedulerConfig: ...
    @property
    def kv_cache_plan(self) -> KVCachePlan: ...
    @property
    def model_name(self) -> str: ...
    @property
    def started(self) -> EngineStarted: ...


OnOutputs = Callable[[list[EngineCoreOutput]], None]
OnLost = Callable[[list[str] | None, EngineDeadError], None]


class EngineClient(Protocol):
    """An engine at a distance. Both callbacks of `open` are called on the event loop that was running then."""

    events: EventHub

    @property
    def engine(self) -> ServedEngine: ...
    @property
    def state(self) -> EngineState: ...
    @property
    def restarts(self) -> int: ...
    @property
    def unavailable(self) -> EngineUnavailableError | None:
        """Why requests are refused now, in state "cannot_restart"."""

    @property
    def seconds_since_step(self) -> float: ...
    @property
    def last_failure(self) -> str | None: ...

    def now(self) -> float:
        """The engine's time, in seconds."""

    def open(self, on_outputs: OnOutputs, on_lost: OnLost) -> None:
        """Begin to work, on the running loop.

        Args:
            on_outputs: called with what each step gave.
            on_lost: called with the requests that a death of the engine has ended, or None: all of them, and it will
                not come back.
        """

    def send(self, command: Command) -> None: ...

    def stop(self) -> None:
        """Have the engine stop after the step it is in, and wait for nothing. `on_lost` is not called any more."""

    def close(self, seconds: float | None = None) -> None:
        """Stop it, and wait until it has stopped and is cleared away. May be called on another thread after `stop`.

        Args:
            seconds: an engine in a process of its own is killed if it runs for longer; None: a default.
        """
