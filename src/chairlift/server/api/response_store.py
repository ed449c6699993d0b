"""The recent answers of /v1/responses, to which later requests of the same key refer (`previous_response_id`)."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from chairlift.errors import RequestError
from chairlift.server.protocol.encoding import encode

STORE_SECONDS: Final = 3600.0
"""Seconds for which a response is kept after its last use."""

SWEEP_SECONDS: Final = 60.0
"""Seconds between two searches for expired responses of all keys."""

RECORD_BYTES: Final = 256
"""Approximate bytes of the record of a response or of an item besides its JSON."""


@dataclass(slots=True)
class StoredResponse:
    """A response with the part of the conversation that its request added.

    Attributes:
        previous: the id of the response that the request continued.
        items: the items of its own input and output as JSON; those of the output by id.
        last_used: in seconds of the clock.
    """

    previous: str | None
    items: dict[str, bytes]
    last_used: float = 0.0

    @property
    def num_bytes(self) -> int:
        return RECORD_BYTES * (1 + len(self.items)) + sum(map(len, self.items.values()))


class KeptResponses:
    """The responses of one API key, the most recently used ones of at most `max_bytes`.

    A conversation consists of several responses, each of which has its own items only. Threads may use it at once,
    because large answers are written on threads.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._response_of: dict[str, str] = {}
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._responses

    def add(self, response_id: str, previous: str | None, given: list[bytes], output: list[dict[str, Any]]) -> None:
        """Keep a response. One that is larger than the store is not kept."""
        items = {str(index): item for index, item in enumerate(given)}
        items |= {item["id"]: encode(item) for item in output}
        response = StoredResponse(previous, items, self._clock())
        with self._lock:
            self._remove(response_id)
            self._remove_expired()
            if response.num_bytes > self._max_bytes:
                return
            self._responses[response_id] = response
            self.num_bytes += response.num_bytes
            self._response_of |= {item["id"]: response_id for item in output}
            while self.num_bytes > self._max_bytes:
                self._remove(next(iter(self._responses)))

    def conversation(self, response_id: str) -> list[bytes]:
        """The items of a response and of all responses before it, as JSON. Raises RequestError if one is not kept."""
        with self._lock:
            self._remove_expired()
            return self._conversation(response_id)

    def _conversation(self, response_id: str) -> list[bytes]:
        parts: dict[str, list[bytes]] = {}
        found: str | None = response_id
        while found is not None:
            response = self._responses.get(found)
            if response is None or found in parts:  # A client may have used an id again.
                message = (
                    f"Previous response with id {found!r:.100} not found: it was not stored, has been removed for "
                    "newer ones, or belongs to another key. Send the whole conversation."
                )
                raise RequestError(message, "previous_response_id", "previous_response_not_found")
            self._use(found, response)
            parts[found] = [*response.items.values()]
            found = response.previous
        return [item for part in reversed(parts.values()) for item in part]

    def item(self, item_id: str) -> bytes | None:
        """An item of an output as JSON; None if it is not kept."""
        with self._lock:
            self._remove_expired()
            if (response_id := self._response_of.get(item_id)) is None:
                return None
            response = self._responses[response_id]
            self._use(response_id, response)
            return response.items[item_id]

    def remove_expired(self) -> None:
        """Remove the responses that nothing has used for STORE_SECONDS."""
        with self._lock:
            self._remove_expired()

    def _use(self, response_id: str, response: StoredResponse) -> None:
        response.last_used = self._clock()
        self._responses.move_to_end(response_id)

    def _remove_expired(self) -> None:
        oldest = self._clock() - STORE_SECONDS
        for response_id in list(self._least_recent(oldest)):
            self._remove(response_id)

    def _least_recent(self, oldest: float) -> Iterator[str]:
        for response_id, response in self._responses.items():
            if response.last_used >= oldest:
                return
            yield response_id

    def _remove(self, response_id: str) -> None:
        response = self._responses.pop(response_id, None)
        if response is not None:
            self.num_bytes -= response.num_bytes
            for item_id in response.items:
                self._response_of.pop(item_id, None)


class ResponseStore:
    """The kept responses of all API keys; `max_bytes` for each, 0 to keep none."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._by_tenant = defaultdict[str, KeptResponses](lambda: KeptResponses(max_bytes, clock))
        self._clock, self._last_sweep = clock, clock()

    def of(self, tenant: str) -> KeptResponses:
        """The responses of a key. It also removes expired responses of other keys, from time to time."""
        if self._clock() - self._last_sweep >= SWEEP_SECONDS:
            self._last_sweep = self._clock()
            for kept in self._by_tenant.values():
                kept.remove_expired()
        return self._by_tenant[tenant]
