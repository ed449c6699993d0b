"""The messages between a front end and an engine process: records in msgpack, one socket for each direction.

front end  --commands (see commands.py)----------------------------------------------------->  engine
           <--EngineReady, LogLine, RequestsStarted, StepResult, AdapterResult, EngineFailed---------------
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from chairlift.engine.process.commands import AdapterResult, Command
from chairlift.engine.served_engine import EngineFacts
from chairlift.events import EVENT_TYPES, Event
from chairlift.outputs import EngineCoreOutput

TO_ENGINE: Final = "to-engine"
TO_FRONT: Final = "to-front"


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Message to the front end: the engine has started and accepts requests."""

    facts: EngineFacts


class LogLine(msgspec.Struct, frozen=True, array_like=True, tag="log_line"):
    """Message to the front end: a line of the engine's log."""

    level: int
    logger: str
    text: str


class RequestsStarted(msgspec.Struct, frozen=True, array_like=True, tag="requests_started"):
    """Message to the front end: the next step computes these requests for the first time."""

    request_ids: list[str]


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag="step_result"):
    """Message to the front end: outputs of a step, and the events since the last message as (type, record).

    Attributes:
        is_continued: the last output is a part, which the first output of the next message continues.
    """

    outputs: list[EngineCoreOutput]
    events: list[tuple[str, msgspec.Raw]]
    is_continued: bool = False


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag="engine_failed"):
    """Message to the front end: the engine could not be built, or a step raised an error, and the process exits. `kind`
    is the name of a class in `chairlift.errors`."""

    message: str
    kind: str = "EngineDeadError"


ToFront = EngineReady | LogLine | RequestsStarted | StepResult | AdapterResult | EngineFailed

_EVENT_DECODERS: Final = {name: msgspec.msgpack.Decoder(kind) for name, kind in EVENT_TYPES.items()}


def pack_events(events: Iterable[Event]) -> list[tuple[str, msgspec.Raw]]:
    """The events of a `StepResult`: msgspec writes a record in the place of Raw, and reads its bytes."""
    return cast("list[tuple[str, msgspec.Raw]]", [(event.type, event) for event in events])


def unpack_events(packed: Iterable[tuple[str, msgspec.Raw]]) -> list[Event]:
    return [_EVENT_DECODERS[name].decode(raw) for name, raw in packed]


Received = TypeVar("Received")


class Link(Generic[Received]):
    """One end of the connection: sends records and receives records of one union. Any thread may send."""

    def __init__(
        self, outgoing: zmq.Socket[bytes], incoming: zmq.Socket[bytes], decoder: msgspec.msgpack.Decoder[Received]
    ) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder
        self._lock = threading.Lock()

    @property
    def fileno(self) -> int:
        """A file descriptor that becomes readable when a message arrives after `receive` has returned None."""
        number = self._incoming.getsockopt(zmq.FD)
        assert isinstance(number, int)
        return number

    def has_receiver(self, seconds: float = 0.0) -> bool:
        """Whether the other end is connected for receiving, or will be within `seconds`. The two directions connect one
        after the other, so a message from the other end does not imply it."""
        with self._lock:
            return bool(self._outgoing.poll(int(seconds * 1e3), zmq.POLLOUT))

    def send(self, record: msgspec.Struct) -> None:
        """Send a record without blocking. It is dropped if there is no receiver, see `has_receiver`."""
        message = self._encoder.encode(record)
        with self._lock:
            try:
                self._outgoing.send(message, zmq.NOBLOCK)
            except zmq.Again:
                return

    def receive(self) -> Received | None:
        """Receive the next message; None if there is none."""
        try:
            message = self._incoming.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return self._decoder.decode(message)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a message for at most `seconds` (None: without a limit); returns whether there is one."""
        return bool(self._incoming.poll(None if seconds is None else int(seconds * 1e3)))

    def close(self, linger: float = 0.0) -> None:
        """Close both sockets, after at most `linger` seconds for messages that were sent."""
        self._outgoing.close(int(linger * 1e3))
        self._incoming.close(0)


class FrontLink(Link[ToFront]):
    """The front end's end of the connection, with two sockets in a folder that is private to both ends.

    Raises:
        OSError: the operating system cannot open a socket now.
    """

    def __init__(self, folder: Path) -> None:
        self._num_senders = 0
        try:
            outgoing, incoming = _sockets()
            self._monitor = incoming.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            outgoing.bind(_endpoint(folder, TO_ENGINE))
            incoming.bind(_endpoint(folder, TO_FRONT))
        except zmq.ZMQError as error:  # is not a subclass of OSError
            raise OSError(error.errno, error.strerror) from None
        super().__init__(outgoing, incoming, msgspec.msgpack.Decoder(ToFront))

    @property
    def has_sender(self) -> bool:
        """Whether the other end is connected for sending. Once a process has exited, and this is false, all of its
        messages have arrived: a thread of the socket reads them, at a time that depends on the load of the machine."""
        while self._monitor.poll(0):
            is_accepted = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_ACCEPTED
            self._num_senders += 1 if is_accepted else -1
        return self._num_senders > 0

    def close(self, linger: float = 0.0) -> None:
        self._incoming.disable_monitor()  # Its events would block the thread of all sockets when no socket reads them.
        super().close(linger)
        self._monitor.close(0)


def open_engine_link(folder: Path, to_engine: str = TO_ENGINE) -> Link[Command]:
    """Open the engine's end of the connection.

    Args:
        to_engine: the name of the socket for messages to the engine.
    """
    outgoing, incoming = _sockets()
    outgoing.connect(_endpoint(folder, TO_FRONT))
    incoming.connect(_endpoint(folder, to_engine))
    return Link(outgoing, incoming, msgspec.msgpack.Decoder(Command))


def _endpoint(folder: Path, name: str) -> str:
    return f"ipc://{folder / name}"


def _sockets() -> tuple[Any, Any]:
    """An outgoing and an incoming socket without high-water marks. A front end that is blocked sends no requests, so
    the messages that wait for it are limited by the requests that the engine has."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    outgoing, incoming = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    for socket in (outgoing, incoming):
        socket.set_hwm(0)
    return outgoing, incoming
