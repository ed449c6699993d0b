"""An engine in a process of its own, started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from chairlift.config import EngineConfig
from chairlift.engine.event_hub import EventHub
from chairlift.engine.input_processor import InputProcessor, NoTokenizer
from chairlift.engine.process.client import EngineState, OnLost, OnOutputs
from chairlift.engine.process.commands import Abort, Add, Command, Stop
from chairlift.engine.process.engine_child import (
    ENGINE_COMMAND,
    GRACE_SECONDS,
    STACKS_SECONDS,
    EngineChild,
    log_line,
    wait_for_facts,
)
from chairlift.engine.process.in_flight import InFlightRequests
from chairlift.engine.process.remote_engine import RemoteEngine, settled
from chairlift.engine.process.restart_policy import LONGEST_BACKOFF, RestartPolicy
from chairlift.engine.process.watchdog import Watchdog, write_state_dump
from chairlift.engine.process.wire import (
    EngineFailed,
    EngineReady,
    EventCredit,
    LogLine,
    RequestsStarted,
    StartFailed,
    StepResult,
    ToFront,
    unpack_events,
)
from chairlift.errors import ConfigError, EngineDeadError, EngineUnavailableError
from chairlift.events import Event
from chairlift.loading.resolve import load_tokenizer, resolve_model

logger = logging.getLogger("chairlift")

DEFAULT_WATCHDOG_TIMEOUT: Final = 120.0
FIRST_START_SECONDS: Final = 1800.0
"""The first start may take so long: minutes for a large model off a slow disk are usual, half an hour is not."""

START_FACTOR: Final = 4.0
"""Times what the first start took: so long may another one take, and at least as long as the watchdog's timeout."""

STOP_SECONDS: Final = 10.0
CONNECTED_YET_SECONDS: Final = 0.002
MESSAGES_A_TURN: Final = 16
EVENTS_A_CREDIT: Final = 256
EVENTS_KEPT: Final = 256


class ProcessClient:
    """Starts an engine process at once; `wait_until_ready` before anything else.

    When the process dies, requests that had begun are lost, and it is started again with the limits that it had, at
    the times of a RestartPolicy. Requests that had not begun, and those that come meanwhile, are run then. If the
    policy lets none wait any longer, they end with EngineUnavailableError, and so do new ones until the engine is back.

    Args:
        config: of the engine.
        watchdog_timeout: seconds that the engine may be silent while it has work; then its state is written to a file,
            and it is started again. So it is if it does not get ready, see START_FACTOR. 0: it may take any time, the
            first start too, which has FIRST_START_SECONDS otherwise, or the timeout if that is longer.
        command: runs `engine_process.main`.

    Raises:
        ModelLoadError: the model cannot be found.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        watchdog_timeout: float = DEFAULT_WATCHDOG_TIMEOUT,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self.events = EventHub()
        self.state: EngineState = "starting"
        self.restarts = 0
        self.last_failure: str | None = None
        self._config = config
        self._command = command
        self._files = resolve_model(config.model)
        self._engine: RemoteEngine | None = None
        self._in_flight = InFlightRequests()
        self._last_events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._num_uncredited = 0
        self._watchdog = Watchdog(watchdog_timeout)
        limit = max(watchdog_timeout, FIRST_START_SECONDS) if watchdog_timeout else 0.0
        self._start_watchdog = Watchdog(limit, GRACE_SECONDS)
        self._last_words = ""
        self._policy = RestartPolicy()
        self._next_start = 0.0
        self._created = self._ready_time = self._last_step = self.now()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._child = EngineChild(config, command, logger.getEffectiveLevel())

    @property
    def engine(self) -> RemoteEngine:
        assert self._engine is not None, "wait_until_ready comes first"
        return self._engine

    @property
    def engine_pid(self) -> int:
        return self._child.pid

    @property
    def unavailable(self) -> EngineUnavailableError | None:
        if self.state != "cannot_restart":
            return None
        seconds = max(0.0, self._next_start - self.now())
        reason = self.last_failure or "it died"
        return EngineUnavailableError(
            f"the engine cannot be started again: {reason}. It is tried again every {LONGEST_BACKOFF:g} s, so it comes "
            "back once the cause is gone (if a file of the model is damaged, replace it); or restart the server",
            seconds,
        )

    @property
    def seconds_since_step(self) -> float:
        return self.now() - self._last_step

    def now(self) -> float:
        """The monotonic clock is the machine's, so the engine's too."""
        return time.monotonic()

    def wait_until_ready(self) -> None:
        """Load the tokenizer meanwhile.

        Raises:
            ModelLoadError, ConfigError: as `build_engine`.
            EngineDeadError: the process ended for another reason, or did not get ready in time.
        """
        try:
            tokenizer = NoTokenizer() if self._config.skip_tokenizer_init else load_tokenizer(self._files)
            facts = wait_for_facts(self._child, self._start_watchdog)
            self._is_ready()
        except BaseException:
            self.close()
            raise
        processor = InputProcessor(facts.model_config, tokenizer, facts.limits, self._config.seed)
        self._engine = RemoteEngine(facts, tokenizer, processor)
        if timeout := self._watchdog.timeout:
            limit = max(timeout, START_FACTOR * (self._ready_time - self._created))
            self._start_watchdog = Watchdog(limit, self._watchdog.interval)

    def open(self, on_outputs: OnOutputs, on_lost: OnLost) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_outputs = on_outputs
        self._on_lost = on_lost
        self.events.open(self._loop)
        self._attach(self._loop)
        if self._watchdog.timeout:
            self._loop.call_later(self._watchdog.interval, self._look)

    def send(self, command: Command) -> None:
        if isinstance(command, Add):
            self._in_flight.add(command.siblings(), is_sent=self.state == "running")
        elif isinstance(command, Abort):
            self._in_flight.remove(command.request_ids)
        if self.state == "running":
            self._child.link.send(command)

    def stop(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.state = "dead"
        if not self._child.is_closed:
            self._detach()
            self._child.link.send(Stop())

    def close(self, seconds: float | None = None) -> None:
        self.stop()
        seconds = STOP_SECONDS if seconds is None else seconds
        self._child.close(seconds if self._engine is not None else 0.0)

    # -- messages ------------------------------------------------------------------------------------------------

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read what the child sends, and learn of its end, on the loop."""
        child = self._child

        def on_end() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(loop.call_later, GRACE_SECONDS, self._ended, child)

        loop.add_reader(child.link.fileno, self._read, child)
        # The descriptor tells of changes only, and something may be there already.
        loop.call_soon(self._read, child)
        child.watch(on_end)

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._child.link.fileno)

    def _read(self, child: EngineChild) -> None:
        """Some messages; the rest in another turn of the loop, so that an engine in a hurry leaves time to others."""
        for _ in range(MESSAGES_A_TURN):
            if self._is_closed or child is not self._child or child.is_closed:
                return
            message = child.link.receive()
            if message is None:
                return
            self._take(message)
        assert self._loop is not None
        self._loop.call_soon(self._read, child)

    def _take(self, message: ToFront) -> None:
        try:
            self._understand(message)
        except Exception:
            logger.exception("a message of the engine was not understood")

    def _understand(self, message: ToFront) -> None:
        match message:
            case StepResult():
                self._take_news(message)
            case RequestsStarted(request_ids):
                self._in_flight.begin(request_ids)
            case LogLine():
                log_line(message)
            case EngineReady(facts) if facts.model_config != self.engine.model_config:
                self._last_words = (
                    f"model {self._config.model!r} is another one than when the server was started: put that back, or "
                    "restart the server to serve this one"
                )
                self._child.kill()
            case EngineReady():
                self._is_back(self._child)
            case EngineFailed(text) | StartFailed(_, text):
                self._last_words = text
                assert self._loop is not None
                self._loop.call_later(STOP_SECONDS, self._child.kill)  # should it not end by itself

    def _take_news(self, news: StepResult) -> None:
        self._watchdog.heard()
        self._last_step = self.now()
        if news.events:
            events = unpack_events(news.events)
            self._last_events.extend(events)
            self.events.publish(events)
            self._num_uncredited += len(events)
            if self._num_uncredited >= EVENTS_A_CREDIT:
                self._child.link.send(EventCredit(self._num_uncredited))
                self._num_uncredited = 0
        self.events.num_dropped += news.num_dropped_events
        if news.outputs:
            self._in_flight.note(news.outputs)
            self._on_outputs(news.outputs)

    # -- death and return ----------------------------------------------------------------------------------------

    def _ended(self, child: EngineChild) -> None:
        """The process is gone, and what it had sent has come."""
        while not (self._is_closed or child.is_closed) and (message := child.link.receive()) is not None:
            self._take(message)
        if self._is_closed or child is not self._child or self._loop is None:
            return
        reason = self._last_words or child.exit_description()
        self._last_words = ""
        self._detach()
        child.close(0.0)
        self._has_failed(self._loop, reason)

    def _has_failed(self, loop: asyncio.AbstractEventLoop, reason: str) -> None:
        """End the requests that are lost, and those that wait if the policy lets them wait no longer."""
        was_refusing = self.unavailable is not None
        restart = self._policy.failed(self.now())
        self.last_failure = reason
        self._next_start = self.now() + restart.delay
        self.state = "restarting" if restart.can_wait else "cannot_restart"
        lost = self._in_flight.lose_begun()
        logger.error(
            "the engine died (%s): %d requests are lost, %d wait; starting it again in %.1f s",
            reason,
            len(lost),
            len(self._in_flight),
            restart.delay,
        )
        self._on_lost(lost, EngineDeadError(f"the engine died ({reason}) and is started again: send this once more"))
        if (error := self.unavailable) is not None and not was_refusing:
            logger.error("%d waiting requests end with an error: %s", len(self._in_flight), error)
            self._on_lost(self._in_flight.lose_all(), error)
        loop.call_later(restart.delay, self._start_again, loop)

    def _start_again(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._is_closed:
            return
        self.restarts += 1
        self._num_uncredited = 0
        self._start_watchdog.heard()
        config = settled(self._config, self.engine.facts, self.restarts)
        try:
            # What it says of itself was said before.
            self._child = EngineChild(config, self._command, max(logging.WARNING, logger.getEffectiveLevel()))
        except (OSError, ConfigError) as error:
            self._has_failed(loop, f"no process can be started: {error}")
            return
        self._attach(loop)

    def _is_ready(self) -> None:
        self.state = "running"
        self._ready_time = self._last_step = self.now()
        self._policy.ready(self._ready_time)

    def _is_back(self, child: EngineChild) -> None:
        if self._is_closed or child is not self._child or child.is_closed:
            return
        if not child.link.has_receiver():
            assert self._loop is not None
            self._loop.call_later(CONNECTED_YET_SECONDS, self._is_back, child)
            return
        self._is_ready()
        again = self._in_flight.again()
        logger.info("the engine is back; %d prompts that waited are run now", len(again))
        for command in again:
            child.link.send(command)

    def _look(self) -> None:
        """Every now and then: is the engine stuck?"""
        if self._is_closed or self._loop is None or self.state == "dead":
            return
        is_ending = bool(self._last_words)
        if self._watchdog.is_stuck(self.state == "running" and not is_ending and len(self._in_flight) > 0):
            silence = f"no step for {self._watchdog.timeout:g} s with {len(self._in_flight)} unfinished requests"
            self._unstick(self._loop, silence)
        is_starting = self.state in ("restarting", "cannot_restart") and not self._child.is_closed
        if self._start_watchdog.is_stuck(is_starting and not is_ending):
            self._unstick(self._loop, f"not ready {round(self._start_watchdog.timeout, 1):g} s after it was started")
        self._loop.call_later(self._watchdog.interval, self._look)

    def _unstick(self, loop: asyncio.AbstractEventLoop, reason: str) -> None:
        self._last_words = f"it hung: {reason}"
        child = self._child
        child.request_stack_dump()

        def dump_and_kill() -> None:
            try:
                where = write_state_dump(
                    reason, self.engine.started, self._in_flight, list(self._last_events), child.stacks()
                )
                logger.error("the engine hangs: %s; its state is in %s", reason, where)
            except OSError as error:
                logger.error("the engine hangs: %s; its state cannot be written: %s", reason, error)
            child.kill()

        loop.call_later(STACKS_SECONDS, dump_and_kill)
