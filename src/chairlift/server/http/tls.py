"""The TLS context of a server, which is loaded before the model."""

from __future__ import annotations

import ssl
from pathlib import Path

from chairlift.errors import ConfigError


def load_tls_context(certfile: Path, keyfile: Path) -> ssl.SSLContext:
    """Load the context of a server with TLS 1.2 and 1.3, without renegotiation and compression.

    The files are read once, so a renewed certificate is used after a restart.

    Args:
        certfile: a PEM file with the certificate of the server, followed by those of intermediate authorities.
        keyfile: a PEM file with the private key, which must not be encrypted.

    Raises:
        ConfigError: a file cannot be read or has other contents, or the key is encrypted, belongs to another
            certificate, or is weaker than OpenSSL accepts.
    """

    def reject_encrypted_key() -> str:
        raise ConfigError(
            f"ssl_keyfile={keyfile} is encrypted, and a server cannot prompt for a passphrase: decrypt it "
            f"(openssl pkey -in {keyfile} -out decrypted.pem) and restrict the read access to the file"
        )

    for name, path in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        try:
            path.open("rb").close()
        except OSError as error:
            problem = f"cannot be opened ({error.strerror or error}): give a file that the user of the server can read"
            raise ConfigError(f"{name}={path}: {problem}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        context.load_cert_chain(certfile, keyfile, reject_encrypted_key)
    except OSError as error:  # ssl.SSLError is one.
        reason = getattr(error, "reason", None)
        if reason == "KEY_VALUES_MISMATCH":
            problem = "the key is not that of the certificate: give a certificate and its own key"
        else:
            problem = (
                f"they cannot be used ({reason or error.strerror or error}): give complete PEM files, with a key of at "
                "least 2048 bits (RSA) or 224 bits (elliptic curve)"
            )
        raise ConfigError(f"ssl_certfile={certfile} and ssl_keyfile={keyfile}: {problem}") from None
    return context
