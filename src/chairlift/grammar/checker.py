"""Says in time whether a grammar can be compiled in time: in a process that can be killed.

llguidance's limits bound most of what a grammar can cost, but not all of it: the intersection of 300 patterns takes
minutes, and a thread that computes it cannot be stopped. So a process of little more than the library compiles every
new grammar first. The program of that process is this module.
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
    """Talks to one such process, which is started when it is first needed. For one thread at a time.

    Args:
        limits: llguidance's.
        seconds: what a grammar may take.
    """

    def __init__(self, limits: dict[str, int], seconds: float) -> None:
        self._limits = json.dumps(limits)
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def ends_in_time(self, grammar: str) -> bool:
        """Whether compiling it ends, well or badly, in time and within MEMORY_BYTES; if not, the process is gone. Its
        CPU time is charged to the account of this thread."""
        process = self._process
        self._process = None
        if process is None or process.poll() is not None:
            process = self._started()
        killer = threading.Timer(self._seconds, process.kill)
        killer.start()
        try:
            with charge_process(process.pid):
                answer = _ask(process, grammar)
        finally:
            killer.cancel()
        if answer != DONE:
            process.kill()
            process.wait()
            return False
        self._process = process
        return True

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        """Once it answers, so that its start counts for no grammar. Keys pressed at a terminal are not for it."""
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, self._limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _ask(process, "")
        return process


def _ask(process: subprocess.Popen[bytes], grammar: str) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    text = grammar.encode()
    with contextlib.suppress(OSError):  # it died: then the answer is empty
        process.stdin.write(HEADER.pack(len(text)) + text)
        process.stdin.flush()
    return process.stdout.read(len(DONE))


def main(requests: BinaryIO, answers: BinaryIO, limits: dict[str, int]) -> None:
    """Compile grammars until nobody sends any more. Each is its length in 4 bytes, and its text."""
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
    with contextlib.suppress(ImportError, OSError, ValueError):  # not everywhere
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.stdin.buffer, sys.stdout.buffer, json.loads(sys.argv[1]))
