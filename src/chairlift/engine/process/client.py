"""The interface between a front end and an engine that runs in a thread of its process or in another process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from chairlift.engine.event_hub import EventHub
from chairlift.engine.process.commands import AdapterResult, Command
from chairlift.engine.served_engine import ServedEngine
from chairlift.errors import EngineDeadError, EngineUnavailableError, Failure
from chairlift.outputs import EngineCoreOutput

EngineState = Literal["starting", "running", "restarting", "cannot_restart", "dead", "unloaded"]
OnOutputs = Callable[[list[EngineCoreOutput]], None]
OnAdapterResult = Callable[[AdapterResult], None]
OnFailure = Callable[[list[str] | None, EngineDeadError], None]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The state of an engine.

    Attributes:
        state: "restarting": started requests have failed, other requests wait for the restart; "cannot_restart":
            restarts have failed for so long that requests end with EngineUnavailableError, while restarts are still
            attempted; "dead": the engine will not run again; "unloaded": there is no engine until a request needs it.
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


class EngineClient(ABC):
    """Sends commands to an engine, and receives its outputs and events.

    Args:
        events: delivers the events of this engine; None creates a hub.

    Attributes:
        engine: the engine, once it is ready.
        state, restarts: see `EngineStatus`.
        last_failure: the last failure of the engine; None if there was none.
        fixed_adapters: why LoRA adapters cannot be loaded or unloaded; None if they can.
    """

    fixed_adapters: str | None = None
    engine: ServedEngine
    _loop: asyncio.AbstractEventLoop

    def __init__(self, events: EventHub | None = None) -> None:
        self.events = EventHub() if events is None else events
        self.state: EngineState = "starting"
        self.restarts = 0
        self.last_failure: Failure | None = None
        self._last_step = self.now()
        self._is_open = False

    @property
    def unavailable(self) -> EngineUnavailableError | None:
        """The error that new requests end with in state "cannot_restart"; None in other states."""
        return None

    @property
    def engine_pid(self) -> int | None:
        """The id of the engine's process; None if it runs in a thread of this process."""
        return None

    @property
    def seconds_since_step(self) -> float:
        return self.now() - self._last_step

    def now(self) -> float:
        """The time of the machine's monotonic clock in seconds, which all processes share."""
        return time.monotonic()

    def open(
        self, on_outputs: OnOutputs, on_failure: OnFailure, on_adapter_result: OnAdapterResult | None = None
    ) -> None:
        """Deliver outputs, failures and events on the running event loop from now on.

        Args:
            on_outputs: called with the outputs of each step.
            on_failure: called with the ids of the requests that a failure of the engine has ended. None in place of
                the ids: all requests have ended, and the engine will not run again.
            on_adapter_result: called with the answers to LoadAdapter and UnloadAdapter.
        """
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._on_outputs = on_outputs
        self._on_failure = on_failure
        self._on_adapter_result = on_adapter_result or (lambda result: None)
        self.events.open(self._loop)
        self._start()

    def _call_on_loop(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function on the event loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no reader is left
            self._loop.call_soon_threadsafe(function, *arguments)

    @abstractmethod
    def _start(self) -> None:
        """Start to deliver outputs on the event loop."""

    @abstractmethod
    def send(self, command: Command) -> None: ...

    @abstractmethod
    def stop(self) -> None:
        """Stop the engine after its current step, without waiting. `on_failure` is not called any more."""

    @abstractmethod
    def close(self, seconds: float | None = None) -> None:
        """Stop the engine, wait until it has stopped, and release its resources. Any thread may call it after `stop`.

        Args:
            seconds: an engine process that runs for longer is killed. None selects a default.
        """
