"""Clients of plain HTTP."""

from __future__ import annotations

import ssl

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For `verify` of httpx: without it each client reads all certificates of the machine, which takes 35 ms."""
