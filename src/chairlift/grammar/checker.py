"""A check, in a process that can be killed, that a grammar compiles within limits of time and memory.

The limits of llguidance bound most of what a grammar can cost, but not all of it: the intersection of 300 patterns
takes minutes, and a thread that computes it cannot be stopped. A process that imports little more than the library
therefore compiles every new grammar first. This module is also the program of that process.
"""

from __future__ import annotations

import json
import subprocess
import sys
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

    def can_compile(self, grammar: str, seconds: float) -> bool:
        """Whether compiling the grammar ends, with or without an error, within `seconds` and the limit of memory.

        If it does not end, the process is killed, and the next call starts another one.
        """
        try:
            self.start_if_needed()  # No grammar's time includes the start.
            self.exchange(grammar.encode(), seconds=seconds)
        except (EOFError, TimeoutError):
            self.close()
            return False
        return True


def main(requests: BinaryIO, replies: BinaryIO, limits: dict[str, int]) -> None:
    """Compile grammars until the input ends. An empty frame reports the start, and another one each end."""
    from llguidance import LLMatcher, LLParserLimits

    limit_memory(MEMORY_BYTES)
    parser_limits = LLParserLimits(**limits, verbose_errors=False)  # type: ignore[arg-type]
    write_frame(replies, b"")
    while (text := read_frame(requests)) is not None:
        LLMatcher.validate_grammar(text.decode(), limits=parser_limits)
        write_frame(replies, b"")


if __name__ == "__main__":
    ignore_shared_signals()
    main(sys.stdin.buffer, sys.stdout.buffer, json.loads(sys.argv[1]))
