"""The event loop of a server: uvloop's where there is one, with limits on TLS handshakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import uvicorn

from chairlift.server.access.server_limits import ServerLimits

try:
    from uvloop import Loop as _Loop
except ImportError:  # there is none on Windows
    from asyncio import SelectorEventLoop as _Loop  # type: ignore[assignment]


class BoundedTlsLoop(_Loop):
    """An event loop whose TLS servers cut off clients that stop in a handshake, or do not answer the end of a session.

    Both happen before and after the protocol of a connection exists, so no timer of the protocol covers them, and the
    loops' own limits are 60 s and 30 s.

    Attributes:
        limits: set by `loop_factory`.
    """

    limits = ServerLimits()

    async def create_server(self, *args: Any, **options: Any) -> Any:
        """As any loop's; an asyncio server."""
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = self.limits.header_timeout
            options["ssl_shutdown_timeout"] = self.limits.write_timeout
        return await super().create_server(*args, **options)


class BoundedTlsConfig(uvicorn.Config):
    """uvicorn's configuration, on such a loop."""

    def __init__(self, limits: ServerLimits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits

    def get_loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop]:
        return type("BoundedTlsLoop", (BoundedTlsLoop,), {"limits": self._limits})
