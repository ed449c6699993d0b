"""Options that decide which clients and calls a server accepts: API keys, TLS, hosts, origins and limits."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from chairlift.errors import ConfigError
from chairlift.options import check_options, option, parse_names, split_names
from chairlift.server.access.keys import KeyRing, load_keys
from chairlift.system.input_files import read_bytes

ANY: Final = "*"
LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "[::1]", "*.localhost")

_HOST: Final = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\*")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")


def parse_hosts(text: str, name: str = "allowed_hosts") -> tuple[str, ...]:
    """The patterns of a comma-separated or JSON list of hosts; raises ConfigError if there are none, or as
    `parse_host`."""
    patterns = tuple(map(parse_host, split_names(text, name)))
    if not patterns:
        raise ConfigError(f"{name} is empty, so every request would be rejected: name a host, or give *")
    return patterns


def parse_host(text: str) -> str:
    """The pattern of a name or an address without a port, in the spelling in which browsers send it. Raises
    ConfigError if it has another form. `*.example.com` matches every name below example.com, and `*` every host."""
    pattern = text.strip().lower()
    try:
        return f"[{ipaddress.IPv6Address(pattern.strip('[]'))}]"
    except ValueError:
        if _HOST.fullmatch(pattern):
            return pattern
    raise ConfigError(
        f"allowed_hosts: {text.strip()!r} is not a host; write a name or an address without a port, *.example.com for "
        "every name below example.com, or * for every host"
    )


def parse_origins(text: str | Sequence[str], name: str = "allowed_origins") -> tuple[str, ...]:
    """The origins of a JSON list; raises ConfigError if a value is not an origin that a browser can send."""
    origins = parse_names(text, name)
    for origin in origins:
        if origin not in (ANY, "null") and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"{name}: {origin!r} is not an origin; write SCHEME://HOST or SCHEME://HOST:PORT in lower case, "
                'without a path or trailing slash, or "*" for every origin'
            )
    return origins


def check_pem(name: str, path: Path) -> None:
    """Raise ConfigError if the file of an option cannot be read, or is encrypted, so that OpenSSL would prompt for a
    passphrase."""
    try:
        content = read_bytes(path)
    except OSError as error:
        raise ConfigError(f"{name}={path} cannot be read ({error.strerror}): give a readable file") from None
    if b"ENCRYPTED" in content:
        raise ConfigError(
            f"{name}={path} is encrypted, and a server cannot prompt for a passphrase: decrypt it "
            f"(openssl pkey -in {path} -out decrypted.pem) and restrict the read access to the file"
        )


@dataclass(frozen=True, slots=True)
class ServerLimits:
    OPTION_GROUP: ClassVar = "Limits"

    max_queued_requests: int = option(
        2048, "Maximum number of sequences (prompts times answers) without a first token. More get a 429.", minimum=1
    )
    max_queued_tokens: int = option(
        2_000_000,
        "Maximum number of prompt tokens of the sequences without a first token. More get a 429.",
        minimum=1,
    )
    max_body_bytes: int = option(8 << 20, "Maximum size of a request body in bytes.", minimum=1024)
    drain_timeout: float = option(
        60.0,
        "Seconds to answer the accepted requests after SIGTERM, SIGQUIT or Ctrl-C. A second signal ends them at once.",
        minimum=0.0,
    )
    timeout_keep_alive: int = option(
        75,
        "Seconds until an idle connection is closed; more than the idle timeout of a load balancer, such as 60.",
        minimum=1,
    )
    response_store_bytes: int = option(
        16 << 20,
        "Maximum size in bytes of the answers of /v1/responses that are kept for each key, for an hour after their "
        "last use, so that later requests can refer to them. 0 keeps none.",
        minimum=0,
    )
    share_prefix_cache: bool = option(
        False,
        "Share cached prefixes between API keys. A key can then infer prompts of other keys from response times.",
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """The access options of a server. Raises ConfigError if they contradict each other, or the keys cannot be loaded.

    Attributes:
        keys: the accepted API keys; a server without keys accepts every request. Default: the keys of `api_key` and
            `api_key_file`.
    """

    OPTION_GROUP: ClassVar = "Access"

    keys: KeyRing = field(default_factory=KeyRing)
    api_key: Sequence[str] | None = option(
        None,
        "API key that requests must have, as SECRET or NAME=SECRET; safer in the environment.",
        is_repeated=True,
    )
    api_key_file: Path | None = option(None, "File of keys with names, limits and weights: TOML or .jsonl.")
    allow_unauthenticated: bool = option(False, "Listen on other addresses than the loopback without keys.")
    allowed_hosts: tuple[str, ...] | None = option(
        None,
        "Allowed values of the Host header, as a,b,*.c; * allows all. Default on the loopback without keys: its own "
        "names.",
        parse=parse_hosts,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origins of web pages that may call the server, as browsers send them, in a JSON list; * is every origin. "
        "Default: none.",
        parse=parse_origins,
    )
    ssl_certfile: Path | None = option(None, "Certificate for TLS (PEM).")
    ssl_keyfile: Path | None = option(None, "Private key of the certificate (PEM).")

    def __post_init__(self) -> None:
        check_options(self)
        parse_origins(list(self.allowed_origins))  # A tuple is not parsed by check_options.
        if self.api_key or self.api_key_file is not None:
            if self.keys:
                raise ConfigError("keys cannot be combined with api_key or api_key_file: give only one of them")
            object.__setattr__(self, "keys", load_keys(self.api_key_file, tuple(self.api_key or ())))
            object.__setattr__(self, "api_key", None)
            object.__setattr__(self, "api_key_file", None)
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile must be given together: give both, or neither")
        for name in ("ssl_certfile", "ssl_keyfile"):
            if (path := getattr(self, name)) is not None:
                check_pem(name, path)
        if self.keys and self.allow_unauthenticated:
            raise ConfigError("allow_unauthenticated has no effect with API keys: give either the option or the keys")

    @property
    def scheme(self) -> str:
        """The URL scheme of the server: `http`, or `https` with TLS."""
        return "http" if self.ssl_certfile is None else "https"

    def is_private(self, host: str) -> bool:
        """Whether a server on the address `host` is only for this machine: without keys, and on the loopback."""
        return not self.keys and not self.allow_unauthenticated and is_loopback(host)

    def allowed_hosts_for(self, host: str) -> tuple[str, ...]:
        """The hosts that requests to a server on the address `host` may name.

        If `allowed_hosts` is None, a server without keys on the loopback allows the names of the loopback and `host`.
        This prevents DNS rebinding by pages in a browser. Other servers allow every host.
        """
        if self.allowed_hosts is not None:
            return self.allowed_hosts
        if not self.is_private(host):
            return (ANY,)
        return tuple(dict.fromkeys((*LOOPBACK_HOSTS, parse_host(host))))

    def check_host(self, host: str) -> None:
        """Raise ConfigError if other machines can reach the address, unless the server has keys or
        `allow_unauthenticated`."""
        if not (self.keys or self.allow_unauthenticated or is_loopback(host)):
            raise ConfigError(
                f"host={host} can be reached from other machines, and there is no API key: give --api-key-file or "
                f"CHAIRLIFT_API_KEY, or --allow-unauthenticated to accept requests without a key"
            )


def is_loopback(host: str) -> bool:
    """Whether all addresses of a host belong to the loopback interface. True if the host has no address."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return True  # Binding to this host raises a separate error.
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
