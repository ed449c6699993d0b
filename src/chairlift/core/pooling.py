"""PoolingScheduler: schedules requests that generate no tokens, and end when their prompt is computed."""

from __future__ import annotations

from chairlift.core.continuous_batching import NextStep
from chairlift.core.request_outputs import last_output
from chairlift.core.scheduler import Scheduler
from chairlift.outputs import EngineCoreOutput, ModelRunnerOutput
from chairlift.request import FinishReason, Request


class PoolingScheduler(Scheduler):
    """Returns a vector or score for each request. Its `max_tokens` is 1, and this token is never computed."""

    def _take_result(self, request: Request, result: ModelRunnerOutput, plan: NextStep, now: float) -> EngineCoreOutput:
        """Finish a request. The place of its next token is given up."""
        request.drop_pending()
        self._finish(request, FinishReason.STOP, now)
        request_id, num_cached = request.request_id, request.meter.num_cached_tokens
        output = EngineCoreOutput(request_id, [], num_cached_tokens=num_cached, pooled=result.pooled[request_id])
        return last_output(request, output, now)
