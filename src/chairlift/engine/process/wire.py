"""The messages between a front end and an engine process: records in msgpack, one socket for each direction.

front end  --commands (see commands.py), EventCredit---------------------------------------->  engine
           <--EngineReady, StartFailed, LogLine, RequestsStarted, StepResult, AdapterResult, EngineFailed--
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

import msgspec
import zmq

from chairlift.engine.process.commands import AdapterResult, Command
from chairlift.engine.served_engine import EngineFacts
from chairlift.events import EVENT_TYPES, Event
from chairlift.outputs import EngineCoreOutput

MAX_IPC_PATH: Final = 100
"""Maximum length of a socket path in bytes; the limit of Unix domain sockets is slightly higher."""


class EventCredit(msgspec.Struct, frozen=True, array_like=True, tag="event_credit"):
    """Message to the engine: the front end has read this number of events, so the engine may send as many more."""

    num_events: int


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Message to the front end: the engine has started and accepts requests."""

    facts: EngineFacts


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag="start_failed"):
    """Message to the front end: the engine could not be built. `kind` is the name of a class in `chairlift.errors`."""

    kind: str
    message: str


class LogLine(msgspec.Struct, frozen=True, array_like=True, tag="log_line"):
    """Message to the front end: a line of the engine's log."""

    level: int
    logger: str
    text: str


class RequestsStarted(msgspec.Struct, frozen=True, array_like=True, tag="requests_started"):
    """Message to the front end: the next step computes these requests for the first time."""

    request_ids: list[str]


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag="step_result"):
    """Message to the front end: the outputs of a step, and the events since the last message as (type, record)."""

    outputs: list[EngineCoreOutput]
    events: list[tuple[str, msgspec.Raw]]
    num_dropped_events: int = 0


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag="engine_failed"):
    """Message to the front end: a step raised an error, and the engine process exits."""

    message: str


ToEngine = Command | EventCredit
ToFront = EngineReady | StartFailed | LogLine | RequestsStarted | StepResult | AdapterResult | EngineFailed

_EVENT_DECODERS: Final = {name: msgspec.msgpack.Decoder(kind) for name, kind in EVENT_TYPES.items()}


def pack_events(events: Iterable[Event]) -> list[tuple[str, msgspec.Raw]]:
    """The events of a `StepResult`: msgspec writes a record in the place of Raw, and reads its bytes."""
    return cast("list[tuple[str, msgspec.Raw]]", [(event.type, event) for event in events])


def unpack_events(packed: Iterable[tuple[str, msgspec.Raw]]) -> list[Event]:
    return [_EVENT_DECODERS[name].decode(raw) for name, raw in packed]


@dataclass(frozen=True, slots=True)
class Address:
    """The endpoints of a front end. The keys (CURVE, in Z85) protect TCP endpoints; files have permissions."""

    to_engine: str
    to_front: str
    front_key: bytes | None = None
    public_key: bytes | None = None
    secret_key: bytes | None = None


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


def open_front_link(folder: Path) -> tuple[Link[ToFront], Address]:
    """Open the front end's end: sockets in a private folder, or on the loopback interface if that is impossible."""
    decoder: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)
    outgoing, incoming = _sockets()
    paths = folder / "to-engine", folder / "to-front"
    if zmq.has("ipc") and max(len(bytes(path)) for path in paths) <= MAX_IPC_PATH:
        for socket, path in zip((outgoing, incoming), paths, strict=True):
            socket.bind(f"ipc://{path}")
        return Link(outgoing, incoming, decoder), Address(f"ipc://{paths[0]}", f"ipc://{paths[1]}")
    front_key, front_secret = zmq.curve_keypair()
    public_key, secret_key = zmq.curve_keypair()
    for socket in (outgoing, incoming):
        socket.curve_server = True
        socket.curve_secretkey = front_secret
        socket.bind("tcp://127.0.0.1:*")
    to_engine, to_front = (socket.getsockopt(zmq.LAST_ENDPOINT).decode() for socket in (outgoing, incoming))
    return Link(outgoing, incoming, decoder), Address(to_engine, to_front, front_key, public_key, secret_key)


def open_engine_link(address: Address) -> Link[ToEngine]:
    """Open the engine's end of the sockets between the front end and the engine."""
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
    outgoing, incoming = _sockets()
    for socket, endpoint in ((outgoing, address.to_front), (incoming, address.to_engine)):
        if address.front_key is not None:
            socket.curve_serverkey = address.front_key
            socket.curve_publickey = address.public_key
            socket.curve_secretkey = address.secret_key
        socket.connect(endpoint)
    return Link(outgoing, incoming, decoder)


def _sockets() -> tuple[Any, Any]:
    """An outgoing and an incoming socket without high-water marks, because the senders limit themselves."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    outgoing, incoming = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    for socket in (outgoing, incoming):
        socket.set_hwm(0)
    return outgoing, incoming
