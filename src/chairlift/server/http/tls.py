"""The TLS context of a server, and the checks of its certificate and key before the model is loaded."""

from __future__ import annotations

import contextlib
import logging
import ssl
from pathlib import Path
from typing import Final

from chairlift.errors import ConfigError

logger = logging.getLogger("chairlift")

INVALID_DATES: Final = {9: "is not valid yet", 10: "has expired"}
"""Problems by OpenSSL's codes X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""

HANDSHAKE_FLIGHTS: Final = 4
"""A number of rounds in which each TLS handshake completes: no handshake has more flights of messages."""


def load_tls_context(certfile: Path, keyfile: Path) -> ssl.SSLContext:
    """Load the context of a server with TLS 1.2 and 1.3, without renegotiation and compression.

    The files are read once, so a renewed certificate is used after a restart. A certificate outside of its period of
    validity is used, and a warning is logged.

    Args:
        certfile: a PEM file with the certificate of the server, followed by those of intermediate authorities.
        keyfile: a PEM file with the private key, which must not be encrypted.

    Raises:
        ConfigError: a file cannot be read or has other contents, or the key is encrypted, belongs to another
            certificate, or is weaker than OpenSSL accepts.
    """
    _check_content("ssl_certfile", certfile, b"-----BEGIN CERTIFICATE-----", "certificate")
    _check_content("ssl_keyfile", keyfile, b"PRIVATE KEY-----", "private key")

    def reject_encrypted_key() -> str:
        raise ConfigError(
            f"ssl_keyfile={keyfile} is encrypted, and a server cannot prompt for a passphrase: decrypt it "
            f"(openssl pkey -in {keyfile} -out decrypted.pem) and restrict the read access to the file"
        )

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        context.load_cert_chain(certfile, keyfile, reject_encrypted_key)
    except ssl.SSLError as error:
        raise ConfigError(_load_error(certfile, keyfile, error)) from None
    if (problem := _date_problem(context, certfile)) is not None:
        logger.warning("ssl_certfile=%s %s: clients will reject it; renew it and restart the server", certfile, problem)
    return context


def _check_content(field: str, path: Path, marker: bytes, description: str) -> None:
    try:
        is_found = marker in path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{field}={path}: {error.strerror or error}; name a PEM file that the user of the server can read"
        ) from None
    if not is_found:
        raise ConfigError(f"{field}={path} contains no {description} in PEM format: name a file that contains one")


def _load_error(certfile: Path, keyfile: Path, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"ssl_keyfile={keyfile} is not the key of ssl_certfile={certfile}: give a certificate and its own key"
    return (
        f"ssl_certfile={certfile} with ssl_keyfile={keyfile} cannot be used ({error.reason or error}): give complete "
        "PEM files, with a key of at least 2048 bits (RSA) or 224 bits (elliptic curve)"
    )


def _date_problem(context: ssl.SSLContext, certfile: Path) -> str | None:
    """The problem with the dates of the certificate; None if it is valid now.

    The standard library cannot read the dates from a file, so they are verified by a handshake with a client in the
    same process that trusts exactly this certificate.
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
        return None  # Clients report other problems.
    return None
