"""The fields that only the first and the last output of a request have."""

from __future__ import annotations

from chairlift.outputs import EngineCoreOutput
from chairlift.request import Request


def first_output(request: Request, output: EngineCoreOutput, now: float) -> EngineCoreOutput:
    """The first output with a token, which leaves the engine at `now`."""
    meter = request.meter
    meter.first_token_time = now
    prefix = None if meter.prefix is None else meter.prefix.for_caller()
    return output._replace(num_cached_tokens=meter.num_cached_tokens, prefix=prefix, times=meter.times(request))


def last_output(request: Request, output: EngineCoreOutput, now: float) -> EngineCoreOutput:
    """The last output of a request that finished at `now`."""
    assert request.finish_reason is not None
    meter, last = request.meter, request.token_ids[-1]
    return output._replace(
        finish_reason=request.finish_reason.value,
        stop_token_id=last if request.num_output_tokens and last in request.stop_token_ids else None,
        times=meter.times(request, finished=now),
        stats=meter.stats(),
    )
