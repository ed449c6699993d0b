"""LiveFeed: the events of an engine as frames of JSON for live pages, with a history of the last minutes."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import msgspec

from chairlift.engine.explanation.explain import Viewer
from chairlift.events import Event
from chairlift.observability.event_log import encode_event
from chairlift.observability.tracked_request import TrackedRequest
from chairlift.observability.tracker import RequestTracker
from chairlift.server.telemetry.redaction import Redactor

HISTORY_SECONDS: Final = 600.0
PART_SECONDS: Final = 15.0
MAX_PART_BYTES: Final = 1 << 20
MAX_HISTORY_BYTES: Final = 16 << 20  # compressed; on a busy server, ten minutes take about 3 MiB
MAX_RECENT_BYTES: Final = 1 << 20
"""A page that is more bytes of events behind than this gets a snapshot instead of them."""
MAX_UNREAD_BYTES: Final = 16 << 20
"""A reader that is more bytes of events behind than this loses the oldest ones. A busy event loop delivers up to
PENDING_EVENTS of `EventHub` at once, which should fit. The objects of the events take about four times as much, so only
1 MiB is kept without a reader."""

_compressor: Final = ThreadPoolExecutor(1, "chairlift-history")
_encode: Final = msgspec.json.Encoder().encode


class HistoryPart(NamedTuple):
    """Events from a snapshot until `end` (seconds of the engine's clock): JSON, separated by commas, compressed."""

    end: float
    compressed: Future[bytes]

    @property
    def num_bytes(self) -> int:
        return len(self.compressed.result()) if self.compressed.done() else 0


class Entry(NamedTuple):
    event: Event
    encoded: bytes


class LiveFeed:
    """An event sink that encodes each event once for all pages, and keeps the events of the last ten minutes.

    It must be added to the `EventHub` after the tracker, whose state a new page receives. The history consists of
    parts that begin with the state of the engine, so that the oldest one can be removed. The events of a part have at
    least the size of this state, so writing states costs no more than writing events. Parts are compressed on a thread,
    because events arrive on the event loop.

    Attributes:
        num_readers: the open streams of all events. Pages do not count.
    """

    def __init__(self, tracker: RequestTracker) -> None:
        self.num_readers = 0
        self._tracker = tracker
        self._recent: deque[Entry] = deque()
        self._recent_bytes = 0
        self._first_index = 0
        self._part: list[bytes] = []
        self._part_bytes = self._opening_bytes = 0
        self._part_start = 0.0
        self._history: deque[HistoryPart] = deque()
        self._changed = asyncio.Event()

    @property
    def next_index(self) -> int:
        """The index of the next event. A reader that has read all events continues with it."""
        return self._first_index + len(self._recent)

    def emit(self, event: Event) -> None:
        entry = Entry(event, encode_event(event))
        self._recent.append(entry)
        self._recent_bytes += len(entry.encoded)
        limit = MAX_UNREAD_BYTES if self.num_readers else MAX_RECENT_BYTES
        while self._recent_bytes > limit:
            self._recent_bytes -= len(self._recent.popleft().encoded)
            self._first_index += 1
        self._changed.set()
        if self._part:
            self._part.append(entry.encoded)
            self._part_bytes += len(entry.encoded)
        else:
            self._begin_part(event.time)
        is_due = self._part_bytes >= MAX_PART_BYTES or event.time - self._part_start >= PART_SECONDS
        if is_due and self._part_bytes >= self._opening_bytes:
            self._end_part(event.time)

    def _end_part(self, now: float) -> None:
        """Compress the current part, begin the next one with the state of the engine, and remove the oldest parts."""
        self._history.append(HistoryPart(now, _compressor.submit(zlib.compress, b",".join(self._part), 1)))
        self._begin_part(now)
        num_bytes = sum(part.num_bytes for part in self._history)
        while num_bytes > MAX_HISTORY_BYTES or self._history[0].end < now - HISTORY_SECONDS:
            num_bytes -= self._history.popleft().num_bytes

    def _begin_part(self, now: float) -> None:
        self._part, self._part_start = self.opening(now), now
        self._opening_bytes, self._part_bytes = sum(map(len, self._part)), 0

    def history(self) -> Iterator[bytes]:
        """The events so far as JSON, separated by commas: parts that begin with a snapshot, in order.

        Later events are not included, even if the iteration takes long: they begin with the current `next_index`.
        """
        parts, last = tuple(self._history), b",".join(self._part)
        earlier = (zlib.decompress(part.compressed.result()) for part in parts)
        return chain(earlier, [last] if last else [])

    async def wait_for_event(self, index: int) -> None:
        """Wait until there is an event with this index."""
        while self.next_index <= index:
            self._changed.clear()
            await self._changed.wait()

    def entries_since(self, index: int) -> tuple[int, list[Entry]]:
        """The number of events from `index` on that are no longer kept, and those that are."""
        num_lost = max(0, self._first_index - index)
        return num_lost, list(islice(self._recent, index + num_lost - self._first_index, None))

    def events_since(self, index: int, redactor: Redactor) -> list[bytes] | None:
        """The JSON of the events from `index` on, as the viewer of the redactor may see them; None if the first of them
        is no longer kept, or if they are too large for a frame."""
        num_lost, entries = self.entries_since(index)
        if num_lost or sum(len(entry.encoded) for entry in entries) > MAX_RECENT_BYTES:
            return None
        if redactor.viewer.is_admin:
            return [entry.encoded for entry in entries]
        visible = (redactor.redact(entry.event) for entry in entries)
        return [encode_event(event) for event in visible if event is not None]

    def opening(self, now: float, redactor: Redactor | None = None) -> list[bytes]:
        """The configuration of the engine and a snapshot of its unfinished requests, redacted unless the viewer is an
        admin; empty before its first event."""
        started, step = self._tracker.started, self._tracker.last_step
        if started is None:
            return []
        redactor = redactor or Redactor(Viewer(), self._tracker)
        running = (request for request in self._tracker.batch.values() if request.state == "running")
        queued = (request for request in self._tracker.unfinished.values() if request.state == "waiting")
        requests = [_request_snapshot(request, redactor) for request in (*running, *queued)]
        snapshot = {"type": "snapshot", "time": now, "step": -1 if step is None else step.step, "requests": requests}
        return [encode_event(started), _encode(snapshot)]


def _request_snapshot(request: TrackedRequest, redactor: Redactor) -> dict[str, Any]:
    waiting = request.waiting_event
    return {
        "arrived": redactor.redact(request.arrived),
        "state": request.state,
        "num_computed": request.num_computed,
        "num_output_tokens": request.num_output_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_preemptions": request.num_preemptions,
        "first_scheduled_time": request.first_scheduled,
        "first_token_time": request.first_token,
        "block_ids": request.block_ids,
        "waiting": None if waiting is None or request.state != "waiting" else redactor.redact(waiting),
    }
