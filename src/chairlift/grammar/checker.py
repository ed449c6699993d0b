"""A check, in a process that can be killed, that a grammar compiles within limits of time and memory.

The limits of llguidance bound most of what a grammar can cost, but not all of it: the intersection of 300 patterns
takes minutes, and a thread that computes it cannot be stopped. A process that imports little more than the library
therefore compiles every new grammar first. This module is also the program of that process.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from typing import BinaryIO, Final

from chairlift.system.child_process import (
    START_SECONDS,
    ChildProcess,
    ignore_shared_signals,
    limit_memory,
    python_command,
    read_frame,
    write_frame,
)

MEMORY_BYTES: Final = 1 << 30
MAX_WALL_SECONDS: Final = 60.0


class CheckerEndedError(Exception):
    """A grammar has ended the process that compiles it, neither by the limit of time nor because it is not needed."""


class GrammarChecker(ChildProcess):
    """Starts and uses one checking process. One thread may call it at a time.

    Args:
        limits: the limits of llguidance's parser.
    """

    def __init__(self, limits: dict[str, int]) -> None:
        # Its own session keeps it from receiving the signals of keys pressed at the terminal.
        super().__init__(
            python_command(__name__, json.dumps(limits)), stderr=subprocess.DEVNULL, start_new_session=True
        )

    def start_if_needed(self) -> None:
        """Start the process unless it runs. Raises TimeoutError and EOFError as `exchange` does."""
        if not self.is_running:
            self.start(START_SECONDS)

    def seconds_to_compile(self, grammar: str, limit: float) -> float:
        """The processor seconds that compiling the grammar takes, with or without an error; infinite if they are more
        than `limit`, or the memory is more than MEMORY_BYTES. The time of other programs does not count.

        If it does not end, the process is killed, and the next call starts another one.

        Raises:
            TimeoutError: the process had too little of the processor to end within MAX_WALL_SECONDS.
            CheckerEndedError: the process has ended by another signal or with an error.
        """
        try:
            self.start_if_needed()  # No grammar's time includes the start.
            return float(self.exchange(repr(limit).encode(), grammar.encode(), seconds=MAX_WALL_SECONDS))
        except EOFError:
            status = self.wait(START_SECONDS)
            self.close()
            if status in (None, -signal.SIGPROF, -signal.SIGKILL):
                return math.inf
            cause = signal.Signals(-status).name if status < 0 else f"status {status}"
            raise CheckerEndedError(f"ends the process that compiles it, with {cause}") from None
        except TimeoutError:
            self.close()
            raise


def main(requests: BinaryIO, replies: BinaryIO, limits: dict[str, int]) -> None:
    """Compile grammars until the input ends, each after its limit in processor seconds, after which the system ends the
    process. An empty frame reports the start, and the processor seconds of a grammar report its end."""
    from llguidance import LLMatcher, LLParserLimits

    limit_memory(MEMORY_BYTES)
    parser_limits = LLParserLimits(**limits, verbose_errors=False)  # type: ignore[arg-type]
    write_frame(replies, b"")
    while (limit := read_frame(requests)) and (text := read_frame(requests)):
        started = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, float(limit))  # Its signal ends the process also within the library.
        LLMatcher.validate_grammar(text.decode(), limits=parser_limits)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_frame(replies, repr(time.process_time() - started).encode())


if __name__ == "__main__":
    ignore_shared_signals()
    main(sys.stdin.buffer, sys.stdout.buffer, json.loads(sys.argv[1]))
