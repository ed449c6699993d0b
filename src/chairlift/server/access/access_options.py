"""Options that decide which clients a server accepts: API keys, TLS, hosts and origins."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from chairlift.errors import ConfigError
from chairlift.server.access.key_reload import KeyReloader
from chairlift.server.access.keys import KeyRing
from chairlift.server.http.allowed_hosts import ANY_HOST, LOOPBACK_HOSTS, parse_host
from chairlift.server.http.cors import CorsOptions
from chairlift.server.http.tls import load_tls_context


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """The access options of a server.

    Attributes:
        keys: The accepted API keys. A server without keys accepts every request.
        key_reloader: Reads the keys again when their file changes; None without a file.
        allow_unauthenticated: Permits a server without keys to listen on addresses other than the loopback.
        ssl_certfile, ssl_keyfile: PEM files of the certificate and its key. The server uses TLS if both are given.
        cors: The origins whose pages may call the server from a browser.
        allowed_hosts: The hosts that requests may name; None for the default of `allowed_hosts_for`.

    Raises:
        ConfigError: One of the two TLS files is missing, or `allow_unauthenticated` is combined with keys.
    """

    keys: KeyRing = field(default_factory=KeyRing)
    allow_unauthenticated: bool = False
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    cors: CorsOptions = field(default_factory=CorsOptions)
    allowed_hosts: tuple[str, ...] | None = None
    key_reloader: KeyReloader | None = None

    def __post_init__(self) -> None:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile must be given together: give both, or neither")
        for name in ("ssl_certfile", "ssl_keyfile"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(path):
                raise ConfigError(f"{name}={path}: no such file")
        if self.keys and self.allow_unauthenticated:
            raise ConfigError("allow_unauthenticated has no effect with API keys: give either the option or the keys")

    @property
    def scheme(self) -> str:
        """The URL scheme of the server: `http`, or `https` with TLS."""
        return "http" if self.ssl_certfile is None else "https"

    def load_tls(self) -> ssl.SSLContext | None:
        """Load the TLS context; None without TLS.

        Raises:
            ConfigError: As `load_tls_context`.
        """
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            return None
        return load_tls_context(self.ssl_certfile, self.ssl_keyfile)

    def allowed_hosts_for(self, host: str) -> tuple[str, ...]:
        """The hosts that requests to a server on the address `host` may name.

        If `allowed_hosts` is None, a server without keys on the loopback allows the names of the loopback and `host`.
        This prevents DNS rebinding by pages in a browser. Other servers allow every host.
        """
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        if self.keys or self.allow_unauthenticated or not is_loopback(host):
            return (ANY_HOST,)
        return tuple(dict.fromkeys((*LOOPBACK_HOSTS, parse_host(host))))

    def check_host(self, host: str) -> None:
        """Reject an address that other machines can reach, unless the server has keys or `allow_unauthenticated`.

        Raises:
            ConfigError: The server would be open to every machine that can reach `host`.
        """
        if self.keys or self.allow_unauthenticated or is_loopback(host):
            return
        raise ConfigError(
            f"host={host} can be reached from other machines, and there is no API key: give --api-key-file or "
            f"CHAIRLIFT_API_KEY, or --allow-unauthenticated to accept requests without a key"
        )


def is_loopback(host: str) -> bool:
    """Whether all addresses of a host belong to the loopback interface. True if the host has no address."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return True  # Binding to this host fails with an error of its own.
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
