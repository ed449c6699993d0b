"""The event loop of a server: uvloop if it is available, with limits on TLS handshakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import uvicorn

from chairlift.server.access.server_limits import ServerLimits

try:
    from uvloop import Loop as _Loop
except ImportError:  # uvloop does not support Windows.
    from asyncio import SelectorEventLoop as _Loop  # type: ignore[assignment]


class BoundedTlsLoop(_Loop):
    """An event loop that closes TLS connections whose client does not complete the handshake or the end of a session.

    The protocol of a connection does not exist at these times, so its timers cannot limit them. The limits of asyncio
    are 60 s and 30 s.

    Attributes:
        limits: The limits of the server, set by `BoundedTlsConfig`.
    """

    limits = ServerLimits()

    async def create_server(self, *args: Any, **options: Any) -> Any:
        """Create a server as asyncio does, with the TLS timeouts of `limits`."""
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = self.limits.header_timeout
            options["ssl_shutdown_timeout"] = self.limits.write_timeout
        return await super().create_server(*args, **options)


class BoundedTlsConfig(uvicorn.Config):
    """A configuration of uvicorn that uses a `BoundedTlsLoop`."""

    def __init__(self, limits: ServerLimits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits

    def get_loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop]:
        """A factory of event loops with the limits of the server."""
        return type("BoundedTlsLoop", (BoundedTlsLoop,), {"limits": self._limits})
