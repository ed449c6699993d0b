"""The interface between a front end and an engine that runs in a thread of its process or in another process."""

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
    """The state of an engine.

    Attributes:
        state: "restarting": started requests have failed, other requests wait for the restart; "cannot_restart":
            restarts have failed for so long that requests end with EngineUnavailableError, while restarts are still
            attempted; "dead": the engine will not run again.
        restarts: number of restarts.
        seconds_since_step: time since the last step ended, or since the engine was ready if there was no step.
        num_unfinished: prompts in progress.
        seconds_stalled: time without a step while requests are unfinished; 0 if none are.
        last_failure: the reason of the last failure; None if the engine has never failed.
    """

    state: EngineState
    restarts: int
    seconds_since_step: float
    num_unfinished: int
    seconds_stalled: float = 0.0
    last_failure: str | None = None


class ServedEngine(Protocol):
    """The properties of an engine that a front end reads."""

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
OnFailure = Callable[[list[str] | None, EngineDeadError], None]


class EngineClient(Protocol):
    """Sends commands to an engine, and receives its outputs and events."""

    events: EventHub

    @property
    def engine(self) -> ServedEngine: ...
    @property
    def state(self) -> EngineState: ...
    @property
    def restarts(self) -> int: ...
    @property
    def unavailable(self) -> EngineUnavailableError | None:
        """The error that new requests end with in state "cannot_restart"; None in other states."""

    @property
    def seconds_since_step(self) -> float: ...
    @property
    def last_failure(self) -> str | None: ...

    def now(self) -> float:
        """The time of the engine's clock, in seconds."""

    def open(self, on_outputs: OnOutputs, on_failure: OnFailure) -> None:
        """Deliver outputs, failures and events on the running event loop from now on.

        Args:
            on_outputs: called with the outputs of each step.
            on_failure: called with the ids of the requests that a failure of the engine has ended. None in place of
                the ids: all requests have ended, and the engine will not run again.
        """

    def send(self, command: Command) -> None: ...

    def stop(self) -> None:
        """Stop the engine after its current step, without waiting. `on_failure` is not called any more."""

    def close(self, seconds: float | None = None) -> None:
        """Stop the engine, wait until it has stopped, and release its resources. Any thread may call it after `stop`.

        Args:
            seconds: an engine process that runs for longer is killed. None selects a default.
        """
