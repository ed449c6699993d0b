"""A check, in a process that can be killed, that a grammar compiles within limits of time and memory.

The limits of llguidance bound most of what a grammar can cost, but not all of it: the intersection of 300 patterns
takes minutes, and a thread that computes it cannot be stopped. A process that imports little more than the library
therefore compiles every new grammar first. This module is also the program of that process.
"""

from __future__ import annotations

import contextlib
import json
import struct
import subprocess
import sys
import threading
from typing import BinaryIO, Final

from chairlift.system.cpu_account import charge_process

HEADER: Final = struct.Struct("<I")
DONE: Final = b"."
MEMORY_BYTES: Final = 1 << 30


class GrammarChecker:
    """Starts and uses one checking process. One thread may call it at a time.

    Args:
        limits: the limits of llguidance's parser.
        seconds: the maximum time to compile one grammar.
    """

    def __init__(self, limits: dict[str, int], seconds: float) -> None:
        self._limits = json.dumps(limits)
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def can_compile(self, grammar: str) -> bool:
        """Whether compiling the grammar ends, with or without an error, within the limits of time and memory.

        If it does not end, the process is killed, and the next call starts another one. The CPU time is charged to the
        account of the calling thread.
        """
        process = self._process
        self._process = None
        if process is None or process.poll() is not None:
            process = self._start_process()
        killer = threading.Timer(self._seconds, process.kill)
        killer.start()
        try:
            with charge_process(process.pid):
                answer = _send_grammar(process, grammar)
        finally:
            killer.cancel()
        if answer != DONE:
            process.kill()
            process.wait()
            return False
        self._process = process
        return True

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start_process(self) -> subprocess.Popen[bytes]:
        """Start a process and wait until it answers, so that no grammar's time includes the start.

        Its own session keeps it from receiving the signals of keys pressed at the terminal.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, self._limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _send_grammar(process, "")
        return process


def _send_grammar(process: subprocess.Popen[bytes], grammar: str) -> bytes:
    """Send a grammar and return the answer: DONE, or nothing if the process ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    text = grammar.encode()
    with contextlib.suppress(OSError):  # A process that has ended gives an empty answer below.
        process.stdin.write(HEADER.pack(len(text)) + text)
        process.stdin.flush()
    return process.stdout.read(len(DONE))


def main(requests: BinaryIO, answers: BinaryIO, limits: dict[str, int]) -> None:
    """Compile grammars until the input ends. Each is preceded by its length in 4 bytes, and answered with DONE."""
    from llguidance import LLMatcher, LLParserLimits

    _limit_memory()
    parser_limits = LLParserLimits(**limits, verbose_errors=False)  # type: ignore[arg-type]
    while len(header := requests.read(HEADER.size)) == HEADER.size:
        text = requests.read(HEADER.unpack(header)[0]).decode()
        if text:
            LLMatcher.validate_grammar(text, limits=parser_limits)
        answers.write(DONE)
        answers.flush()


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # Not every platform supports the limit.
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.stdin.buffer, sys.stdout.buffer, json.loads(sys.argv[1]))
