"""The first start of an engine process, which the front end waits for: there is no event loop yet."""

from __future__ import annotations

import time
from typing import Final

from chairlift import errors
from chairlift.engine.process.engine_child import GRACE_SECONDS, STACKS_SECONDS, EngineChild, log_line
from chairlift.engine.process.in_flight import InFlight
from chairlift.engine.process.watchdog import Watchdog, main_frame, write_state_dump
from chairlift.engine.process.wire import CannotStart, EngineFacts, Ready, Said
from chairlift.errors import ChairliftError, EngineDeadError
from chairlift.system.memory_limits import limit_hint

CONNECT_SECONDS: Final = 10.0


def wait_for_facts(child: EngineChild, watchdog: Watchdog) -> EngineFacts:
    """Wait until the engine takes requests.

    Args:
        watchdog: its timeout bounds the start; its interval is GRACE_SECONDS.

    Raises:
        ModelLoadError, ConfigError: as `build_engine`.
        EngineDeadError: the process ended for another reason, or did not get ready in time.
    """
    while True:
        message = child.link.receive()
        match message:
            case Ready(facts):
                if not child.link.has_receiver(CONNECT_SECONDS):
                    raise EngineDeadError(f"the engine process did not connect within {CONNECT_SECONDS:g} s")
                return facts
            case CannotStart(kind, text):
                raise _as_raised(kind, text)
            case Said():
                log_line(message)
            case None if not child.link.wait(GRACE_SECONDS):
                _check_start(child, watchdog)


def _check_start(child: EngineChild, watchdog: Watchdog) -> None:
    """The process has been silent for GRACE_SECONDS and is not ready."""
    if child.has_ended:
        way_out = f"; free some memory{hint}" if (hint := limit_hint()) else ""
        raise EngineDeadError(f"the engine process ended while it started ({child.why_ended()}){way_out}")
    if not watchdog.is_stuck(True):
        return
    child.ask_for_stacks()
    time.sleep(STACKS_SECONDS)
    stacks, limit = child.stacks(), watchdog.timeout
    reason = f"not ready {limit:g} s after it was started"
    try:
        where = f"all its threads are in {write_state_dump(reason, None, InFlight(), [], stacks)}"
    except OSError as error:
        where = f"its state cannot be written: {error}"
    raise EngineDeadError(
        f"the engine hangs: {reason}, it was {main_frame(stacks)}; {where}. If it only needs longer, give it "
        f"--watchdog-timeout with more seconds, or 0 for no limit"
    )


def _as_raised(kind: str, message: str) -> ChairliftError:
    error: type[ChairliftError] = getattr(errors, kind)
    return error(message)
