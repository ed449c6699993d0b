"""ProcessClient: runs an engine in a separate process, and restarts it when it dies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from chairlift.config import EngineConfig
from chairlift.engine.event_hub import EventHub
from chairlift.engine.input_processor import NoTokenizer
from chairlift.engine.process.client import EngineClient
from chairlift.engine.process.commands import Abort, AdapterResult, Add, Command, LoadAdapter, Stop, UnloadAdapter
from chairlift.engine.process.divided_outputs import OutputJoiner
from chairlift.engine.process.engine_child import (
    ENGINE_COMMAND,
    POLL_SECONDS,
    STACK_DUMP_SECONDS,
    EngineChild,
    log_stacks,
    wait_for_facts,
    write_log_line,
)
from chairlift.engine.process.in_flight import InFlightRequests
from chairlift.engine.process.restart_policy import LONGEST_BACKOFF, RestartPolicy
from chairlift.engine.process.watchdog import Watchdog
from chairlift.engine.process.wire import (
    EngineFailed,
    EngineReady,
    LogLine,
    RequestsStarted,
    StepResult,
    ToFront,
    unpack_events,
)
from chairlift.engine.served_engine import EngineFacts, ServedEngine
from chairlift.engine.sibling_groups import unfinished_ids
from chairlift.errors import ConfigError, EngineDeadError, EngineUnavailableError, Failure, ModelLoadError
from chairlift.loading.resolve import resolve_model
from chairlift.loading.text.tokenizer import Tokenizer

logger = logging.getLogger("chairlift")

DEFAULT_WATCHDOG_TIMEOUT: Final = 120.0
FIRST_START_SECONDS: Final = 1800.0
"""Time limit of the first start. Minutes are usual for a large model on a slow disk; half an hour is not."""

START_FACTOR: Final = 4.0
"""The time limit of a restart is this multiple of the first start's time, and at least the watchdog's timeout."""

STOP_SECONDS: Final = 10.0
CONNECT_POLL_SECONDS: Final = 0.002
MESSAGES_PER_CALL: Final = 16


class ProcessClient(EngineClient):
    """Starts an engine process at once, and restarts it when it dies. Call `wait_until_ready` before any other method.

    When the process dies, the requests that it had started are lost, and a RestartPolicy decides when it is restarted
    with the same limits. Other requests, and those that arrive in the meantime, run after the restart. When the policy
    does not let them wait, they end with EngineUnavailableError, and so do new ones until the engine is ready again.

    Args:
        config: the configuration of the engine.
        watchdog_timeout: seconds without a step after which an engine with work is stuck. Its stacks are then logged,
            and it is restarted. The first start is limited by FIRST_START_SECONDS, or by the timeout if that is
            longer, and a restart as described at START_FACTOR. 0: there are no limits.
        command: runs `engine_process.main`.
        events: see EngineClient.
        turn_folder: the folder of the StepTurn of all engines that use the same CPU cores; None if there is one engine.

    Raises:
        ModelLoadError: the model cannot be found, or a file is damaged.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        watchdog_timeout: float = DEFAULT_WATCHDOG_TIMEOUT,
        command: Sequence[str] = ENGINE_COMMAND,
        events: EventHub | None = None,
        turn_folder: Path | None = None,
    ) -> None:
        super().__init__(events)
        self._config = config
        self._command = command
        self._source = resolve_model(config.model, accept_terms=config.accept_terms)
        self._source.check()
        self._in_flight = InFlightRequests()
        self._watchdog = Watchdog(watchdog_timeout)
        limit = max(watchdog_timeout, FIRST_START_SECONDS) if watchdog_timeout else 0.0
        self._start_watchdog = Watchdog(limit, POLL_SECONDS)
        self._failure = ""
        self._policy = RestartPolicy()
        self._next_start = 0.0
        self._created = self._ready_time = self.now()
        self._is_closed = False
        self._turn_folder = turn_folder
        self._child = self._make_child(config, logger.getEffectiveLevel())

    def _make_child(self, config: EngineConfig, log_level: int) -> EngineChild:
        return EngineChild(config, self._command, log_level, self._turn_folder)

    @property
    def engine_pid(self) -> int:
        return self._child.pid

    @property
    def unavailable(self) -> EngineUnavailableError | None:
        if self.state != "cannot_restart" or self.last_failure is None:
            return None
        advice = (
            f"A restart is attempted every {LONGEST_BACKOFF:g} s: remove the cause (if a file of the model is damaged, "
            "replace it), or restart the server"
        )
        reason, public = (f"the engine cannot be restarted: {text}. {advice}" for text in self.last_failure.texts)
        return EngineUnavailableError(reason, public, max(0.0, self._next_start - self.now()))

    def wait_until_ready(self) -> ProcessClient:
        """Wait until the engine accepts requests, and load the tokenizer in the meantime; returns this client.

        Raises:
            ModelLoadError, ConfigError: as `build_engine`.
            EngineDeadError: the process ended for another reason, or was not ready in time.
        """
        try:
            tokenizer, failure = self._load_tokenizer()
            del self._source  # It holds the open file.
            facts = wait_for_facts(self._child, self._start_watchdog)
            if failure is not None:
                raise failure
            self._set_ready()
        except BaseException:
            self.close()
            raise
        self.engine = ServedEngine(facts, tokenizer, self._config.seed)
        if timeout := self._watchdog.timeout:
            limit = max(timeout, START_FACTOR * (self._ready_time - self._created))
            self._start_watchdog = Watchdog(limit, self._watchdog.interval)
        return self

    def _load_tokenizer(self) -> tuple[Tokenizer | NoTokenizer, ModelLoadError | None]:
        """Return the tokenizer, or the error, which is raised only if the engine process has no earlier one: it checks
        architecture and formats before the tokenizer."""
        if self._config.skip_tokenizer_init:
            return NoTokenizer(), None
        try:
            return self._source.tokenizer(), None
        except ModelLoadError as error:
            return NoTokenizer(), error

    def _start(self) -> None:
        self._attach_child()
        if self._watchdog.timeout:
            self._loop.call_later(self._watchdog.interval, self._check_watchdogs)

    def send(self, command: Command) -> None:
        if isinstance(command, Add):
            self._in_flight.add_siblings(command.requests(), is_sent=self.state == "running")
        elif isinstance(command, Abort):
            self._in_flight.remove(command.request_ids)
        if self.state == "running":
            self._child.link.send(command)
        elif isinstance(command, LoadAdapter):
            error = "the engine is being restarted: load the adapter again when it is ready"
            self._loop.call_soon(self._on_adapter_result, AdapterResult(command.module.lora_int_id, error))
        elif isinstance(command, UnloadAdapter):
            self._loop.call_soon(self._on_adapter_result, AdapterResult(command.lora_id))

    def stop(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.state = "dead"
        if not self._child.is_closed:
            self._detach()
            self._child.link.send(Stop())

    def close(self, seconds: float | None = None) -> None:
        is_starting = self.state == "starting"
        self.stop()
        self._child.close(0.0 if is_starting else STOP_SECONDS if seconds is None else seconds)

    # -- messages ------------------------------------------------------------------------------------------------

    def _attach_child(self) -> None:
        """Handle the messages and the exit of the child on the event loop."""
        child, loop = self._child, self._loop
        self._joiner = OutputJoiner()
        loop.add_reader(child.link.fileno, self._read, child)
        # The descriptor reports changes only, and messages may have arrived before.
        loop.call_soon(self._read, child)
        child.notify_on_exit(partial(self._call_on_loop, loop.call_soon, self._handle_exit, child))

    def _detach(self) -> None:
        if self._is_open and not self._loop.is_closed():
            self._loop.remove_reader(self._child.link.fileno)

    def _is_running(self, child: EngineChild) -> bool:
        return not self._is_closed and child is self._child and not child.is_closed

    def _read(self, child: EngineChild) -> None:
        """Handle a limited number of messages, only one of a divided output, and the rest in another callback, so that
        others run in between."""
        for _ in range(MESSAGES_PER_CALL):
            if not self._is_running(child) or (message := child.link.receive()) is None:
                return
            self._handle(message)
            if isinstance(message, StepResult) and message.is_continued:
                break
        self._loop.call_soon(self._read, child)

    def _handle(self, message: ToFront) -> None:
        try:
            self._dispatch(message)
        except Exception:
            logger.exception("a message of the engine process could not be handled: %s", type(message).__name__)

    def _dispatch(self, message: ToFront) -> None:
        match message:
            case StepResult():
                self._watchdog.record_progress()
                self._last_step = self.now()
                if message.events:
                    self.events.publish(unpack_events(message.events))
                if outputs := self._joiner.add(message.outputs, message.is_continued):
                    self._in_flight.remove(output.request_id for output in outputs if output.finish_reason is not None)
                    self._on_outputs(outputs)
            case RequestsStarted(request_ids):
                self._in_flight.mark_started(request_ids)
            case AdapterResult():
                self._on_adapter_result(message)
            case LogLine():
                write_log_line(message)
            case EngineReady(facts) if facts.model_config != self.engine.facts.model_config:
                self._failure = (
                    f"model {self._config.model!r} has changed since the server was started: restore it, or restart "
                    "the server to serve the new one"
                )
                self._child.kill()
            case EngineReady():
                self._resume(self._child)
            case EngineFailed(text):
                self._failure = text
                self._loop.call_later(STOP_SECONDS, self._child.kill)  # in case it does not exit

    # -- failure and restart ---------------------------------------------------------------------------------------

    def _handle_exit(self, child: EngineChild) -> None:
        """Handle the last messages of a process that has exited, once it has ended, and restart it."""
        if self._is_running(child) and not child.has_ended:
            self._loop.call_later(POLL_SECONDS, self._handle_exit, child)
            return
        while self._is_running(child) and (message := child.link.receive()) is not None:
            self._handle(message)
        if not self._is_running(child):
            return
        reason = self._failure or child.exit_description()
        self._failure = ""
        self._detach()
        child.close(0.0)
        self._handle_failure(reason)

    def _handle_failure(self, reason: str) -> None:
        """End the requests that are lost, and waiting ones if the policy does not let them wait; schedule a restart."""
        was_unavailable = self.unavailable is not None
        delay, can_wait = self._policy.record_failure(self.now())
        failure = self.last_failure = Failure(reason)
        self._next_start = self.now() + delay
        self.state = "restarting" if can_wait else "cannot_restart"
        lost = self._in_flight.remove_lost()
        logger.error(
            f"the engine died ({failure}): {len(lost)} requests are lost, {len(self._in_flight)} requests wait; "
            f"restarting it in {delay:.1f} s"
        )
        texts = (f"the engine died ({text}) and is being restarted: send the request again" for text in failure.texts)
        self._on_failure(lost, EngineDeadError(*texts))
        if (error := self.unavailable) is not None and not was_unavailable:
            waiting = unfinished_ids(self._in_flight)
            logger.error("%d waiting requests end with an error: %s", len(waiting), error)
            self._in_flight.remove(waiting)
            self._on_failure(waiting, error)
        self._loop.call_later(delay, self._restart)

    def _restart(self) -> None:
        if self._is_closed:
            return
        self.restarts += 1
        self._start_watchdog.record_progress()
        config = restart_config(self._config, self.engine.facts, self.restarts)
        try:
            # Its startup summary is in the log already.
            self._child = self._make_child(config, max(logging.WARNING, logger.getEffectiveLevel()))
        except (OSError, ConfigError) as error:
            self._handle_failure(f"the engine process cannot be started: {error}")
        else:
            self._attach_child()

    def _set_ready(self) -> None:
        self.state = "running"
        self._ready_time = self._last_step = self.now()
        self._policy.record_ready(self._ready_time)

    def _resume(self, child: EngineChild) -> None:
        """Send the waiting requests to a restarted engine, once it receives messages."""
        if not self._is_running(child):
            return
        if not child.link.has_receiver():
            self._loop.call_later(CONNECT_POLL_SECONDS, self._resume, child)
            return
        self._set_ready()
        for module in self.engine.adapters.in_memory:
            child.link.send(LoadAdapter(module))
        commands = self._in_flight.make_resend_commands()
        logger.info("the engine is running again; %d waiting prompts were sent to it", len(commands))
        for command in commands:
            child.link.send(command)

    def _check_watchdogs(self) -> None:
        """Check every interval whether the engine or its start is stuck."""
        if self._is_closed:
            return
        is_ending = bool(self._failure)
        if self._watchdog.check(self.state == "running" and not is_ending and len(self._in_flight) > 0):
            silence = f"no step for {self._watchdog.timeout:g} s with {len(self._in_flight)} unfinished requests"
            self._kill_stuck(silence)
        is_starting = self.state in ("restarting", "cannot_restart") and not self._child.is_closed
        if self._start_watchdog.check(is_starting and not is_ending):
            self._kill_stuck(f"not ready {round(self._start_watchdog.timeout, 1):g} s after its start")
        self._loop.call_later(self._watchdog.interval, self._check_watchdogs)

    def _kill_stuck(self, reason: str) -> None:
        """Log the stacks of a stuck engine, and kill it, which leads to its restart."""
        self._failure = f"it was stuck: {reason}"
        logger.error("the engine is stuck: %s", reason)
        child = self._child
        child.request_stack_dump()

        def log_and_kill() -> None:
            log_stacks(child.stacks())
            child.kill()

        self._loop.call_later(STACK_DUMP_SECONDS, log_and_kill)


def restart_config(config: EngineConfig, facts: EngineFacts, run: int) -> EngineConfig:
    """The configuration of the restart number `run`: the limits of the first engine, because requests were checked
    against them, and separate log files. LoRA adapters are loaded once it is ready, with their earlier numbers."""
    return replace(
        config,
        num_kv_blocks=facts.kv_cache_plan.num_blocks,
        kv_cache_memory_bytes=None,
        max_model_len=facts.scheduler_config.max_model_len,
        max_num_batched_tokens=facts.scheduler_config.max_num_batched_tokens,
        lora_modules=None,
        max_loras=facts.max_loras,
        event_log=_numbered(config.event_log, run),
        record_trace=_numbered(config.record_trace, run),
    )


def _numbered(path: Path | None, run: int) -> Path | None:
    return None if path is None else path.with_name(f"{path.stem}.{run}{path.suffix}")
