"""Reads the file of API keys again when it changes, while the server runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from chairlift.errors import ConfigError
from chairlift.server.access.keys import KeyRing

logger = logging.getLogger("chairlift")

POLL_SECONDS: Final = 1.0


class KeyReloader:
    """Replaces the keys of a ring by those of its file after each change of the file.

    Requests in progress are not affected. A file that is invalid, or from which all keys are missing, is reported in
    the log, and the keys stay as they are.

    Args:
        keys: the keys in use.
        path: the file.
        load: reads all keys again.
        on_change: called after the keys were replaced.
    """

    def __init__(
        self, keys: KeyRing, path: Path, load: Callable[[], KeyRing], on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._keys = keys
        self._path = path
        self._load = load
        self.on_change = on_change
        self._version = self._read_version()

    async def run(self) -> None:
        """Watch the file until this call is cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Read the keys if the file has changed."""
        version = self._read_version()
        if version == self._version:
            return
        self._version = version
        try:
            loaded = await asyncio.to_thread(self._load)
        except ConfigError as error:
            logger.error("the API keys were not changed: %s", error)
            return
        if loaded.tenant_weights() != self._keys.tenant_weights():
            logger.warning("new weights of API keys take effect after a restart of the server")
        self._keys.replace(loaded)
        self.on_change()
        logger.info("%d API keys were read from %s", len(loaded), self._path)

    def _read_version(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
