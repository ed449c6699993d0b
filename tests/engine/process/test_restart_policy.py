"""The delays of RestartPolicy, and the time until which requests wait for a restart."""

from __future__ import annotations

from chairlift.engine.process.restart_policy import LONGEST_BACKOFF, MAX_FAILURES, MAX_WAIT_SECONDS, RestartPolicy


def fail_until_rejecting(policy: RestartPolicy, start_seconds: float) -> tuple[list[float], float]:
    """The delays before starts for which requests wait, and the time of the failure after which they do not."""
    now, delays = 100.0, []
    policy.record_ready(0.0)
    while (restart := policy.record_failure(now))[1]:
        delays.append(restart[0])
        now += restart[0] + start_seconds
    assert restart == (LONGEST_BACKOFF, False)
    return delays, now


def test_delays_double_until_requests_do_not_wait() -> None:
    delays, rejected_at = fail_until_rejecting(RestartPolicy(), 0.1)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert rejected_at - 100.0 < MAX_WAIT_SECONDS


def test_requests_do_not_wait_for_a_restart_that_begins_too_late() -> None:
    for start_seconds in (0.5, 3.0, 9.0, 25.0, 300.0):
        _, rejected_at = fail_until_rejecting(RestartPolicy(), start_seconds)
        assert rejected_at - 100.0 <= MAX_WAIT_SECONDS + start_seconds


def test_restarts_continue_without_a_limit() -> None:
    policy = RestartPolicy()
    _, now = fail_until_rejecting(policy, 1.0)
    for _ in range(5000):
        now += LONGEST_BACKOFF
        assert policy.record_failure(now) == (LONGEST_BACKOFF, False)


def test_a_stable_engine_resets_the_delays() -> None:
    policy = RestartPolicy()
    _, now = fail_until_rejecting(policy, 1.0)
    policy.record_ready(now + 40.0)
    assert policy.record_failure(now + 140.0) == (0.5, True)


def test_requests_wait_for_a_limited_number_of_restarts_of_an_unstable_engine() -> None:
    policy, now, delays = RestartPolicy(), 0.0, []
    for _ in range(MAX_FAILURES + 3):
        policy.record_ready(now)
        now += 1.0
        delay, can_wait = policy.record_failure(now)
        now += delay
        delays.append(delay if can_wait else None)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None, None, None]
