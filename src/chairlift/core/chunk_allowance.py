"""ChunkAllowance: the number of prompt tokens that the estimated time of a step allows."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.request import Request
from chairlift.step_time import CHUNK_MULTIPLE, StepTime


class ChunkAllowance:
    """Divides the time of one step among the chunks that it computes.

    Every chunk has at least one token, and the chunks of a step together at least CHUNK_MULTIPLE, so that prompts
    progress however slow the machine is.

    Args:
        step_time: the estimate and its limits; None allows any chunk.
        running: the running requests. Those that have sampled a token wait for each step, and their tokens use a part
            of its time.
        keeps_tpot: a step is also limited by the smallest objective of the time per output token of these requests,
            except for those that it misses even without a chunk.
    """

    def __init__(self, step_time: StepTime | None, running: Sequence[Request], keeps_tpot: bool = False) -> None:
        self._step_time = step_time
        self._running = running
        self._keeps_tpot = keeps_tpot
        self._seconds: float | None = None
        self._num_guaranteed = CHUNK_MULTIPLE

    def take(self, start: int, count: int) -> int:
        """The number of tokens of the next chunk, at most `count`, from position `start` on."""
        time = self._step_time
        if time is None:
            return count
        # Computed for the first chunk only, because most steps have none.
        seconds = self._seconds_for_chunks(time) if self._seconds is None else self._seconds
        count = min(count, max(time.largest_chunk(start, seconds), self._num_guaranteed, 1))
        self._seconds = seconds - time.chunk_seconds(start, count)
        self._num_guaranteed -= count
        return count

    def _seconds_for_chunks(self, time: StepTime) -> float:
        decoding = [request for request in self._running if request.num_tokens > request.num_prompt_tokens]
        target = time.decode_target if decoding else time.prefill_target
        used = time.fixed + sum(time.chunk_seconds(request.num_computed_tokens, 1) for request in decoding)
        if self._keeps_tpot:
            slos = (request.sampling_params.slo for request in decoding)
            objectives = (slo.tpot_ms / 1e3 for slo in slos if slo is not None and slo.tpot_ms is not None)
            target = min([target, *(seconds for seconds in objectives if seconds > used)])
        return target - used
