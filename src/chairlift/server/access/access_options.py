"""Who reaches the server, and over what."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from chairlift.errors import ConfigError
from chairlift.server.access.keys import KeyRing
from chairlift.server.http.allowed_hosts import LOOPBACK_HOSTS, AllowedHosts
from chairlift.server.http.cors import CorsOptions
from chairlift.server.http.tls import load_tls_context


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Attributes:
    keys: who may ask; everybody if empty.
    allow_unauthenticated: everybody may, over the network too.
    ssl_certfile, ssl_keyfile: PEM files; TLS if they are given.
    cors: which pages in browsers may call.
    allowed_hosts: hosts that requests may name; None chooses by keys and address, see `allowed_hosts_for`.

    Raises:
        ConfigError: one of the two files without the other, or a file that is not there.
    """

    keys: KeyRing = field(default_factory=KeyRing)
    allow_unauthenticated: bool = False
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    cors: CorsOptions = field(default_factory=CorsOptions)
    allowed_hosts: AllowedHosts | None = None

    def __post_init__(self) -> None:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile go together: give both, or neither")
        for name in ("ssl_certfile", "ssl_keyfile"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(path):
                raise ConfigError(f"{name}={path}: no such file")
        if self.keys and self.allow_unauthenticated:
            raise ConfigError("allow_unauthenticated has no effect beside API keys: leave out the one or the others")

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"

    def load_tls(self) -> ssl.SSLContext | None:
        """The context to serve TLS with; None: plain HTTP.

        Raises:
            ConfigError: as `load_tls_context`.
        """
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            return None
        return load_tls_context(self.ssl_certfile, self.ssl_keyfile)

    def allowed_hosts_for(self, host: str) -> AllowedHosts:
        """The hosts that requests to a server on `host` may name.

        If `allowed_hosts` is None, a server on the loopback without keys allows the names of the loopback and `host`,
        so that no page of a foreign name reaches it through a browser; other servers allow every host.
        """
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        if self.keys or self.allow_unauthenticated or not is_loopback(host):
            return AllowedHosts()
        return AllowedHosts((*LOOPBACK_HOSTS, host))

    def check_host(self, host: str) -> None:
        """Refuse to serve everybody who can reach this machine, unless that is meant.

        Raises:
            ConfigError: `host` is not this machine's own, and there is no key.
        """
        if self.keys or self.allow_unauthenticated or is_loopback(host):
            return
        raise ConfigError(
            f"host={host} can be reached from other machines, and there is no API key: give --api-key-file or "
            f"CHAIRLIFT_API_KEY, or say --allow-unauthenticated if everybody may use this server"
        )


def is_loopback(host: str) -> bool:
    """Whether an address, or all that a name stands for, are this machine's own."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return True  # nothing can listen there; whoever tries says so
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
