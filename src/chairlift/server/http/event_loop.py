"""The event loop of a server: uvloop if it is available, with limits on TLS handshakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import uvicorn

from chairlift.server.http.server_limits import ServerLimits

try:
    from uvloop import Loop as _Loop
except ImportError:  # uvloop does not support Windows.
    from asyncio import SelectorEventLoop as _Loop  # type: ignore[assignment]


class BoundedTlsConfig(uvicorn.Config):
    """A configuration of uvicorn that limits how long TLS clients take for the handshake and the end of a session.

    The protocol of a connection does not exist at these times, so its timers cannot limit them. The limits of asyncio
    are 60 s and 30 s.
    """

    def __init__(self, limits: ServerLimits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits

    def get_loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop]:
        """A factory of event loops with the limits of the server."""
        limits = self._limits

        class BoundedTlsLoop(_Loop):
            async def create_server(self, *args: Any, **options: Any) -> Any:
                if options.get("ssl") is not None:
                    options["ssl_handshake_timeout"] = limits.header_timeout
                    options["ssl_shutdown_timeout"] = limits.write_timeout
                return await super().create_server(*args, **options)

        return BoundedTlsLoop
