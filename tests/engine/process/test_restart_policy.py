"""When an engine that died is started again, and until when requests wait for it."""

from __future__ import annotations

from chairlift.engine.process.restart_policy import LONGEST_BACKOFF, MAX_FAILURES, MAX_WAIT_SECONDS, RestartPolicy


def fail_until_refused(policy: RestartPolicy, start_seconds: float) -> tuple[list[float], float]:
    """The delays before starts for which requests wait, and the time of the failure after which they do not."""
    now, delays = 100.0, []
    policy.ready(0.0)
    while (restart := policy.failed(now)).can_wait:
        delays.append(restart.delay)
        now += restart.delay + start_seconds
    assert restart.delay == LONGEST_BACKOFF
    return delays, now


def test_starts_are_twice_as_far_apart_each_time_until_requests_wait_no_longer() -> None:
    delays, refused = fail_until_refused(RestartPolicy(), 0.1)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert refused - 100.0 < MAX_WAIT_SECONDS


def test_no_start_is_waited_for_that_begins_too_late() -> None:
    for start_seconds in (0.5, 3.0, 9.0, 25.0, 300.0):
        _, refused = fail_until_refused(RestartPolicy(), start_seconds)
        assert refused - 100.0 <= MAX_WAIT_SECONDS + start_seconds


def test_starts_go_on_for_ever() -> None:
    policy = RestartPolicy()
    now, restart = fail_until_refused(policy, 1.0)[1], None
    for _ in range(5000):
        now += LONGEST_BACKOFF
        restart = policy.failed(now)
        assert (restart.delay, restart.can_wait) == (LONGEST_BACKOFF, False)


def test_an_engine_that_runs_for_a_while_begins_anew() -> None:
    policy = RestartPolicy()
    _, now = fail_until_refused(policy, 1.0)
    policy.ready(now + 40.0)
    restart = policy.failed(now + 140.0)
    assert (restart.delay, restart.can_wait) == (0.5, True)


def test_an_engine_that_dies_soon_after_each_start_is_waited_for_a_limited_number_of_times() -> None:
    policy, now, delays = RestartPolicy(), 0.0, []
    for _ in range(MAX_FAILURES + 3):
        policy.ready(now)
        now += 1.0
        restart = policy.failed(now)
        now += restart.delay
        delays.append(restart.delay if restart.can_wait else None)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None, None, None]
