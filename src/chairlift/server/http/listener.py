"""The socket on which a server listens."""

from __future__ import annotations

import socket
from typing import Final

from chairlift.errors import ConfigError

MAX_PORT: Final = 65535


def listen(host: str, port: int) -> socket.socket:
    """Listen on a port, or on a free one if it is 0. Raises ConfigError if it is not possible."""
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(f"port must be from 1 to {MAX_PORT}, or 0 for a free port, got {port}: choose another --port")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host:.100}:{port}: {error}; choose another --host or --port") from None
    return listener


def url_of(host: str, listener: socket.socket, scheme: str = "http") -> str:
    """The URL of a server without a slash at its end."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
