"""Fuzzing with Hypothesis: targets, damage to valid files, and limits of time and memory."""

from __future__ import annotations

import json
import random
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

MAX_SECONDS = 1.0
"""CPU seconds of one case. An engine that reads the file between two steps delays its requests by as much."""

MAX_WAIT_SECONDS = 60.0
"""Seconds of one case on the clock, after which it is blocked."""

MAX_BYTES = 64 << 20

Case = Callable[[Any], None]


@dataclass(slots=True)
class Target:
    """A function that reads untrusted input.

    Attributes:
        cases: the generated inputs.
        check: runs the function with one input, and raises any exception that is not an expected error.
        num_short: the number of cases in the short run.
        prepare: is called before the first case, for work that is not part of it.
        outcomes: the number of cases with each outcome.
    """

    name: str
    cases: st.SearchStrategy[Any]
    check: Case
    num_short: int = 60
    prepare: Callable[[], object] = lambda: None
    outcomes: dict[str, int] = field(default_factory=dict)

    def add(self, outcome: str) -> None:
        """Count the outcome of a case. If all cases had the same outcome, the target would test little."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    @property
    def num_cases(self) -> int:
        return sum(self.outcomes.values())


@contextmanager
def guarded() -> Iterator[None]:
    """Raise an AssertionError if the body computes for longer than MAX_SECONDS, blocks for longer than
    MAX_WAIT_SECONDS, or allocates more than MAX_BYTES at once."""

    def late(number: int, frame: FrameType | None) -> None:
        limit = f"{MAX_SECONDS} CPU seconds" if number == signal.SIGPROF else f"{MAX_WAIT_SECONDS} s"
        raise AssertionError(f"does not end within {limit}")

    before = {number: signal.signal(number, late) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, MAX_WAIT_SECONDS)
    tracemalloc.start()
    started = time.process_time()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < MAX_BYTES, f"allocates {peak >> 20} MiB"
        seconds = time.process_time() - started
        assert seconds < MAX_SECONDS, f"takes {seconds:.1f} CPU seconds, without a chance to interrupt it"
    finally:
        tracemalloc.stop()
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def run_cases(target: Target, num_cases: int, run_seed: int) -> None:
    """Run cases of a target, which are the same for the same seed."""

    @seed(run_seed)
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(target.cases)
    def run(case: Any) -> None:
        with guarded():
            target.check(case)

    target.prepare()
    run()


# -- generation of cases -------------------------------------------------------------------------------------------

INTERESTING = (0, 1, 2, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 1 << 24, (1 << 31) - 1, (1 << 32) - 1, 1 << 60, (1 << 64) - 1)


@st.composite
def damaged(draw: st.DrawFn, wholes: list[bytes], header: int | None = None) -> bytes:
    """Draw a valid file and damage it: bits flipped, numbers replaced, bytes removed or repeated, the end truncated.

    Args:
        header: the number of bytes at the start that can be damaged, or None for all bytes.
    """
    data = bytearray(draw(st.sampled_from(wholes)))
    num_damages = draw(st.integers(0, 4))
    random_ = random.Random(draw(st.integers(0, (1 << 32) - 1)))
    for _ in range(num_damages):
        if not data:
            break
        at = random_.randrange(min(header or len(data), len(data)))
        kind = random_.randrange(5)
        if kind == 0:
            data[at] ^= 1 << random_.randrange(8)
        elif kind == 1:
            width = random_.choice((1, 4, 8))
            number = random_.choice(INTERESTING) & ((1 << 8 * width) - 1)
            data[at : at + width] = number.to_bytes(width, "little")
        elif kind == 2:
            del data[at : at + random_.choice((1, 4, 8, 100))]
        elif kind == 3:
            source = random_.randrange(len(data))
            data[at:at] = data[source : source + random_.choice((1, 8, 64))]
        else:
            del data[at:]
    return bytes(data)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", "\ud800", "9" * 5000, 1 << 4000, -1, 0, 1e400]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def altered(draw: st.DrawFn, wholes: list[dict[str, Any]], values: st.SearchStrategy[Any] = JSON) -> dict[str, Any]:
    """Draw a valid object, and replace or remove a few values at any depth."""
    whole = json.loads(json.dumps(draw(st.sampled_from(wholes))))
    for _ in range(draw(st.integers(0, 3))):
        places = list(_places(whole))
        if not places:
            break
        container, key = draw(st.sampled_from(places))
        if draw(st.booleans()) and isinstance(container, dict):
            del container[key]
        else:
            container[key] = draw(values)
    return dict(whole)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container and key below a value; of long lists only the first and the last keys."""
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    else:
        keys = [*range(min(3, len(value))), *range(max(3, len(value) - 3), len(value))]
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def deep(depth: int = 200_000) -> list[bytes]:
    """Return JSON texts that are nested `depth` deep, complete and truncated."""
    return [b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth]
