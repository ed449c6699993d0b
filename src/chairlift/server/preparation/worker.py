"""A preparation worker: the process that parses, validates and tokenizes large bodies.

Large bodies are prepared in a process of their own because their parts cannot be interrupted: the JSON parser, the
validation and the tokenizer hold the interpreter for as long as they run. Here they delay no token and no other
request, they can be ended, and their memory is returned with the process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from chairlift.errors import ModelLoadError, RequestError
from chairlift.server.api.protocol.validation_errors import describe_validation_errors
from chairlift.server.http.body_limits import check_depth
from chairlift.server.http.unicode_check import find_surrogate, may_contain_surrogate
from chairlift.server.preparation.planners import EndpointPlanners, make_planners
from chairlift.server.preparation.request_plan import RequestPlanner
from chairlift.server.preparation.worker_process import (
    PreparedRequest,
    Rejection,
    WorkerFailure,
    WorkerReply,
    WorkerSetup,
    read_frame,
    tokenizer_fingerprint,
    write_frame,
)
from chairlift.system.cpu_account import charge_cpu_time_to

MEMORY_BYTES: Final = 4 << 30
"""Address space of a worker."""

NICENESS: Final = 5
"""The scheduling priority is lowered by this, so that steps of the engine come first."""


def prepare(planner: RequestPlanner[Any, Any], raw: bytes, max_depth: int) -> PreparedRequest | Rejection:
    """Parse and validate a body, and plan it; what is wrong with it becomes a rejection."""
    try:
        check_depth(raw, max_depth)
        given = _parse(raw)
        if may_contain_surrogate(raw) and (surrogate := find_surrogate(given)) is not None:
            return Rejection(*describe_validation_errors([cast("ErrorDetails", surrogate)], given))
        body = planner.body_type.model_validate(given)
        return PreparedRequest(planner.without_content(body), planner.plan(body))
    except ValidationError as error:
        return Rejection(*describe_validation_errors(error.errors(), given))
    except RequestError as error:
        return Rejection(str(error), error.param)
    except MemoryError:
        return Rejection(f"The request needs more than {MEMORY_BYTES >> 30} GiB of memory to be read: shorten it", None)


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except UnicodeDecodeError as error:
        raise RequestError(f"The request body is not valid JSON: it is not UTF-8 ({error.reason})") from None
    except ValueError as error:
        raise RequestError(f"The request body is not valid JSON: {error}") from None


def main() -> None:
    """Prepare bodies until standard input ends."""
    # Frames go to the original standard output; what a library prints must not get between them.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    _limit_this_process()
    frame = read_frame(sys.stdin.buffer)
    if frame is None:
        return
    setup: WorkerSetup = pickle.loads(frame)
    planners = _planners_or_failure(setup)
    # A body may become millions of objects: the collector would visit all of them again and again while they are made.
    gc.freeze()
    gc.disable()
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        endpoint, raw = pickle.loads(frame)
        cpu_seconds: list[float] = []
        with charge_cpu_time_to(cpu_seconds.append, time.process_time):
            outcome = _outcome(planners, endpoint, raw, setup.max_json_depth)
        reply = WorkerReply(outcome, sum(cpu_seconds), _memory())
        write_frame(answers, pickle.dumps(reply))
        del frame, raw, outcome, reply
        gc.collect()


def _planners_or_failure(setup: WorkerSetup) -> EndpointPlanners | WorkerFailure:
    try:
        return _planners(setup)
    except Exception as error:
        return WorkerFailure(f"the tokenizer cannot be loaded: {error}")


def _outcome(
    planners: EndpointPlanners | WorkerFailure, endpoint: str, raw: bytes, max_depth: int
) -> PreparedRequest | Rejection | WorkerFailure:
    if isinstance(planners, WorkerFailure):
        return planners
    try:
        return prepare(getattr(planners, endpoint), raw, max_depth)
    except Exception as error:
        traceback.print_exc()
        return WorkerFailure(f"an unexpected error: {error!r:.200}")


def _planners(setup: WorkerSetup) -> EndpointPlanners:
    from chairlift.engine.input_processor import NoTokenizer
    from chairlift.engine.process.remote_engine import RemoteEngine
    from chairlift.loading.resolve import load_tokenizer, resolve_model

    files = resolve_model(setup.model)
    if tokenizer_fingerprint(files) != setup.fingerprint:
        raise ModelLoadError(f"{files.path} has changed since the server was started: restart the server")
    tokenizer = NoTokenizer() if setup.skip_tokenizer_init else load_tokenizer(files)
    return make_planners(RemoteEngine.create(setup.facts, tokenizer), setup.api)


def _limit_this_process() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(NICENESS)


def _memory() -> int:
    """Bytes that this process holds; 0 where the system does not say. (The peak that getrusage reports may be that of
    the parent process, from before this program was loaded.)"""
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


if __name__ == "__main__":
    main()
