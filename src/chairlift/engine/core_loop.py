"""What the engine core does with a command, whichever way it came."""

from __future__ import annotations

from chairlift.core.engine_core import EngineCore
from chairlift.engine.commands import Abort, Add
from chairlift.engine.input_processor import EngineRequest
from chairlift.errors import RequestError
from chairlift.outputs import EngineCoreOutput
from chairlift.request import FinishReason


def handle_command(core: EngineCore, command: Add | Abort) -> list[EngineCoreOutput]:
    """Add or abort requests, between two steps; returns the refusals."""
    match command:
        case Add(requests):
            return [refusal for request in requests if (refusal := _add(core, request)) is not None]
        case Abort(request_ids, reason):
            for request_id in request_ids:
                core.abort(request_id, reason)
            return []


def _add(core: EngineCore, request: EngineRequest) -> EngineCoreOutput | None:
    try:
        core.add(request.to_request())
    except RequestError as error:
        reason = FinishReason.ERROR.value
        return EngineCoreOutput(request.request_id, [], finish_reason=reason, error=str(error), error_param=error.param)
    return None
