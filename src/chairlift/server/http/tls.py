"""The TLS context of a server: its certificate and key, checked before a model is loaded."""

from __future__ import annotations

import contextlib
import logging
import ssl
from pathlib import Path
from typing import Final

from chairlift.errors import ConfigError

logger = logging.getLogger("chairlift")

INVALID_DATES: Final = {9: "is not valid yet", 10: "has expired"}
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""

HANDSHAKE_FLIGHTS: Final = 4
"""More rounds than a TLS handshake has flights of messages."""


def load_tls_context(certfile: Path, keyfile: Path) -> ssl.SSLContext:
    """The server side of TLS 1.2 and 1.3, without renegotiation and compression.

    The files are read once: a renewed certificate is used after a restart. A certificate outside its period of validity
    is used, with a warning.

    Args:
        certfile: PEM, the server's certificate first, then those of the authorities between it and the root.
        keyfile: PEM, not encrypted.

    Raises:
        ConfigError: a file cannot be read or holds something else, the key is encrypted or that of another certificate,
            or it is weaker than OpenSSL accepts.
    """
    _check_content("ssl_certfile", certfile, b"-----BEGIN CERTIFICATE-----", "certificate")
    _check_content("ssl_keyfile", keyfile, b"PRIVATE KEY-----", "private key")

    def refuse_passphrase() -> str:
        raise ConfigError(
            f"ssl_keyfile={keyfile} is encrypted, and a server cannot ask for its passphrase: decrypt it "
            f"(openssl pkey -in {keyfile} -out decrypted.pem) and restrict who can read the file"
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        context.load_cert_chain(certfile, keyfile, refuse_passphrase)
    except ssl.SSLError as error:
        raise ConfigError(_why_refused(certfile, keyfile, error)) from None
    if (problem := _date_problem(context, certfile)) is not None:
        logger.warning("ssl_certfile=%s %s: clients will refuse it; renew it and restart", certfile, problem)
    return context


def _check_content(field: str, path: Path, mark: bytes, what: str) -> None:
    try:
        is_there = mark in path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{field}={path}: {error.strerror or error}; name a PEM file that the server's user can read"
        ) from None
    if not is_there:
        raise ConfigError(f"{field}={path} holds no {what} in PEM format: name a file that does")


def _why_refused(certfile: Path, keyfile: Path, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"ssl_keyfile={keyfile} is not the key of ssl_certfile={certfile}: give the two that belong together"
    return (
        f"ssl_certfile={certfile} with ssl_keyfile={keyfile} cannot be used ({error.reason or error}): give whole PEM "
        "files, with a key of at least 2048 bits (RSA) or 224 bits (elliptic curve)"
    )


def _date_problem(context: ssl.SSLContext, certfile: Path) -> str | None:
    """What a client that trusts exactly this certificate objects to in its dates.

    The standard library reads no dates from a file, but a handshake with itself verifies them.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(certfile)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(HANDSHAKE_FLIGHTS):
            for side in (client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return INVALID_DATES.get(error.verify_code)
    except ssl.SSLError:
        return None  # what else is wrong is for clients to judge
    return None
