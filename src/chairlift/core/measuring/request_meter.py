"""RequestMeter: what is counted for one request.

Slot-seconds are computed without a loop over time: n slots allocated at t1 ... tn and freed at T were held for
n * T - (t1 + ... + tn) seconds. `hold_moment` is the sum of these times over the slots held, `write_moment` over the
slots written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chairlift.outputs import PrefixMatch, RequestStats, RequestTimes
from chairlift.request import Request, WaitReason


@dataclass(slots=True)
class RequestMeter:
    """The waits, times and costs of a request so far.

    Attributes:
        wait_reason: why it was not admitted to the last step; None while it is not the head of the queue or parked.
        wait_mark: the counters of the wait log when it last started to wait; None before its arrival is observed.
        num_cached_tokens: prompt tokens that had K and V when it was admitted for the first time; prefix: why not more.
        done_time: when a member of a static batch ended that keeps its memory until the batch ends.
        recompute_until: the number of tokens that had K and V before a preemption.
    """

    wait_reason: WaitReason | None = None
    wait_mark: dict[str, int] | None = None
    steps_waited: dict[str, int] = field(default_factory=dict)
    num_cached_tokens: int = 0
    prefix: PrefixMatch | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    done_time: float | None = None
    recompute_until: int = 0
    num_recomputed_tokens: int = 0
    num_padding_tokens: int = 0
    hold_moment: float = 0.0
    write_moment: float = 0.0
    kv_slot_seconds_held: float = 0.0
    kv_slot_seconds_used: float = 0.0

    def start_holding(self, num_held: int, num_written: int, now: float) -> None:
        """Start to count slot-seconds of the slots that were allocated, of which some are already written."""
        self.hold_moment = num_held * now
        self.write_moment = num_written * now

    def stop_holding(self, num_held: int, num_written: int, now: float) -> None:
        """Add the slot-seconds of the slots that are about to be freed."""
        used_until = now if self.done_time is None else self.done_time
        self.kv_slot_seconds_held += num_held * now - self.hold_moment
        self.kv_slot_seconds_used += num_written * used_until - self.write_moment

    def count_recomputed(self, start: int, end: int) -> int:
        """Count the tokens of `start` to `end - 1` that are recomputed after a preemption; returns their number."""
        num_recomputed = max(0, min(end, self.recompute_until) - start)
        self.num_recomputed_tokens += num_recomputed
        return num_recomputed

    def times(self, request: Request, finished: float | None = None) -> RequestTimes:
        """The times of the request so far."""
        return RequestTimes(request.arrival_time, self.first_scheduled_time, self.first_token_time, finished)

    def stats(self) -> RequestStats:
        """The waits and the cost of the request so far."""
        return RequestStats(*(getattr(self, name) for name in RequestStats.__slots__))
