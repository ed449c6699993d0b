"""The main program of a preparation worker: a process that parses, validates and tokenizes large bodies.

The JSON parser, the validation and the tokenizer hold the interpreter lock while they run, and cannot be interrupted.
In a process of its own this work delays no other request, it can be stopped, and its memory is freed with the process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any, Final

from chairlift.engine.served_engine import ServedEngine
from chairlift.errors import ModelLoadError, RequestError
from chairlift.server.preparation.planners import PlanningModel, PreparedRequest, RequestPlanner
from chairlift.server.preparation.worker_process import WorkerReply, WorkerSetup, tokenizer_fingerprint
from chairlift.system.child_process import limit_memory, read_frame, write_frame

MEMORY_BYTES: Final = 4 << 30
"""The maximum address space of a worker."""

NICENESS: Final = 5
"""The nice value of a worker. The higher it is, the lower is its priority, so that engine steps run first."""


def prepare(
    planner: RequestPlanner[Any, Any], model: PlanningModel, raw: bytes
) -> PreparedRequest | RequestError | str:
    """The prepared request; the error if the body is invalid; a string if an unexpected error occurred."""
    try:
        return planner.prepare(model, raw)
    except RequestError as error:
        # The traceback of the first one would keep the body in memory.
        return RequestError(str(error), error.param, error.code)
    except MemoryError:
        return RequestError(f"parsing the request needs more than {MEMORY_BYTES >> 30} GiB of memory: shorten it")
    except Exception as error:
        traceback.print_exc()
        return f"unexpected error: {error!r:.200}"


def main() -> None:
    """Prepare bodies until standard input ends."""
    # Replies use the original standard output. Output of libraries is redirected, so that it does not mix with them.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    limit_memory(MEMORY_BYTES)
    with contextlib.suppress(AttributeError, OSError):  # Not every system supports it.
        os.nice(NICENESS)
    if (frame := read_frame(sys.stdin.buffer)) is None:
        return
    setup: WorkerSetup = pickle.loads(frame)
    model = _load_model(setup)
    # The collector would repeatedly traverse the millions of objects that a body can consist of.
    gc.freeze()
    gc.disable()
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        endpoint, raw = pickle.loads(frame)
        outcome = model if isinstance(model, str) else prepare(setup.planners[endpoint], model, raw)
        reply = WorkerReply(outcome, _resident_memory())
        write_frame(replies, pickle.dumps(reply))
        del frame, raw, outcome, reply
        gc.collect()


def _load_model(setup: WorkerSetup) -> PlanningModel | str:
    """The model to plan for, or the reason why its tokenizer cannot be loaded."""
    try:
        from chairlift.engine.input_processor import NoTokenizer
        from chairlift.loading.resolve import load_tokenizer, resolve_model

        files = resolve_model(setup.model)
        if tokenizer_fingerprint(files) != setup.fingerprint:
            raise ModelLoadError(f"{files.path} has changed since the server was started: restart the server")
        tokenizer = NoTokenizer() if setup.skip_tokenizer_init else load_tokenizer(files)
        return PlanningModel(ServedEngine(setup.facts, lambda: tokenizer), setup.api)
    except Exception as error:
        return f"the tokenizer cannot be loaded: {error}"


def _resident_memory() -> int:
    """The resident memory of this process in bytes; 0 on systems without /proc.

    The peak of getrusage is not used, because it may be that of the parent process before this program was loaded.
    """
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


if __name__ == "__main__":
    main()
