"""Who asks: API keys, and what they allow.

A key is a long random secret. Only its SHA-256 is kept, which says nothing of a secret that cannot be guessed; what a
caller brings is hashed and compared with every hash in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import re
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from chairlift.errors import ConfigError

logger = logging.getLogger("chairlift")

MIN_SECRET_CHARACTERS: Final = 16
"""Characters; fewer can be guessed, if they were not chosen by chance from very many."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HASH = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """The key of a call; `request.state.key`.

    Attributes:
        name: what people call it.
        tenant: what its requests are scheduled and counted under.
        is_admin: it may see the engine and everybody's requests.
    """

    name: str
    tenant: str
    is_admin: bool


ANONYMOUS = KeyInfo("", "", True)
"""Every caller of a server without keys."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may ask for; None is no limit.

    Attributes:
        requests_per_minute: calls of an API.
        tokens_per_minute: prompt and output tokens; what a key takes beyond it, since nobody knows an output's length
            beforehand, it waits for.
        max_concurrent: calls that are being answered at once.
        cpu_seconds_per_minute: CPU time outside of the engine: parsing, validation, templates, tokenizing, grammars.
            It is known after the work, so a key may exceed it once and then has to wait.
    """

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_concurrent: int | None = None
    cpu_seconds_per_minute: float | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """One key as it is kept.

    Attributes:
        digest: SHA-256 of the secret.
        weight: its share under the fair policy, in relation to others.
        is_short: the secret has less than MIN_SECRET_CHARACTERS characters; of a hash nobody knows.
    """

    info: KeyInfo
    digest: bytes
    limits: KeyLimits = field(default_factory=KeyLimits)
    weight: float = 1.0
    is_short: bool = False


def digest(secret: str) -> bytes:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def new_secret() -> str:
    """A secret with 256 bits of chance in it."""
    return f"sk-{secrets.token_urlsafe(32)}"


def key_record(secret: str, **given: object) -> dict[str, object]:
    """The entry of a key file for a secret; `given` are its other fields, None for those left out."""
    hashed = f"sha256:{digest(secret).hex()}"
    record = {"hash": hashed, **{name: value for name, value in given.items() if value is not None}}
    parse_key(record, "key")
    return record


def to_toml(record: Mapping[str, object]) -> str:
    """An entry as TOML, whose strings, numbers and booleans are written like JSON's."""
    return "\n".join(["[[keys]]", *(f"{name} = {json.dumps(value)}" for name, value in record.items())])


class KeyRing:
    """All keys of a server; without any, everybody may do everything.

    Raises:
        ConfigError: two keys have the same name or the same secret.
    """

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = list(keys)
        self.by_tenant: Mapping[str, Key] = {key.info.tenant: key for key in self._keys}
        if len(self.by_tenant) < len(self._keys):
            raise ConfigError("two API keys have the same name: each needs one of its own")
        if len({key.digest for key in self._keys}) < len(self._keys):
            raise ConfigError("two API keys are the same secret: each needs one of its own")

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, secret: str) -> KeyInfo | None:
        """Whose secret it is; takes the same time wherever it stands, and if it is nobody's."""
        brought = digest(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, brought):
                found = key.info
        return found

    def log_short_secrets(self) -> None:
        """Say which secrets are short, in the log."""
        if short := [key.info.name for key in self._keys if key.is_short]:
            logger.warning(
                "API keys with less than %d characters can be guessed: %s; `chairlift key NAME` makes a long one",
                MIN_SECRET_CHARACTERS,
                ", ".join(short),
            )

    def tenant_weights(self) -> str | None:
        """The weights that are not 1, in the form of `EngineConfig.tenant_weights`."""
        named = [f"{key.info.tenant}={key.weight:g}" for key in self._keys if key.weight != 1]
        return ",".join(named) or None


def load_keys(path: Path | None, secrets_given: Iterable[str] = ()) -> KeyRing:
    """The keys of a file, and those given in the clear.

    Args:
        path: TOML with an array of tables `keys`, or JSON lines (.jsonl); fields as `Key` and `KeyLimits` have them:
            name, hash (hexadecimal SHA-256), admin, weight, requests_per_minute, tokens_per_minute, max_concurrent,
            cpu_seconds_per_minute.
        secrets_given: each a secret, or NAME=SECRET; these are admins.

    Raises:
        ConfigError: the file cannot be read or an entry is wrong; says which and why.
    """
    records = [] if path is None else _read_records(path)
    keys = [parse_key(record, f"{path}, key {number}") for number, record in enumerate(records, start=1)]
    for number, given in enumerate(secrets_given, start=1):
        name, equals, secret = given.partition("=")
        if not equals:
            name, secret = ("default" if number == 1 else f"default-{number}"), given
        if not secret.strip("=") or not _NAME.fullmatch(name):
            problem = f"api_key {number} must be a secret, or NAME=SECRET with a name of {_NAME.pattern}"
            raise ConfigError(f"{problem}; give one that ends with = (base64) a name")
        if not (secret.isascii() and secret.isprintable()) or " " in secret:
            raise ConfigError(
                f"api_key {number} ({name}) must be of ASCII characters that can be seen, since clients send others in "
                f"many ways or not at all; `chairlift key {name}` makes one"
            )
        keys.append(Key(KeyInfo(name, name, True), digest(secret), is_short=len(secret) < MIN_SECRET_CHARACTERS))
    if path is not None and not records:
        raise ConfigError(f"api_key_file={path} holds no key: `chairlift key NAME` makes one")
    return KeyRing(keys)


def _read_records(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        keys = tomllib.loads(text).get("keys", [])
    except OSError as error:
        raise ConfigError(f"api_key_file={path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"api_key_file={path} is neither TOML nor, as .jsonl, JSON lines: {error}") from None
    if not isinstance(keys, list):
        raise ConfigError(f"api_key_file={path}: `keys` must be an array of tables ([[keys]])")
    return keys


def parse_key(record: Any, where: str) -> Key:
    """The key of an entry; raises ConfigError, which begins with `where`."""
    if not isinstance(record, dict):
        raise ConfigError(f"{where} must be a table, got {record!r:.80}")
    known = {"name", "hash", "admin", "weight", *KeyLimits.__dataclass_fields__}
    if unknown := record.keys() - known:
        raise ConfigError(f"{where}: unknown fields {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")
    name, admin = record.get("name"), record.get("admin", False)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: name must match {_NAME.pattern}, got {name!r:.80}")
    hashed = _HASH.fullmatch(record["hash"]) if isinstance(record.get("hash"), str) else None
    if hashed is None:
        raise ConfigError(f"{where} ({name}): hash must be the hexadecimal SHA-256 of the secret; see `chairlift key`")
    if not isinstance(admin, bool):
        raise ConfigError(f"{where} ({name}): admin must be true or false, got {admin!r}")
    limits = KeyLimits(
        _number(record, "requests_per_minute", where),
        _number(record, "tokens_per_minute", where),
        _count(record, "max_concurrent", where),
        _number(record, "cpu_seconds_per_minute", where),
    )
    weight = _number(record, "weight", where)
    return Key(KeyInfo(name, name, admin), bytes.fromhex(hashed[1]), limits, 1.0 if weight is None else weight)


def _number(record: dict[str, Any], name: str, where: str) -> float | None:
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{where}: {name} must be a number > 0, got {value!r}")
    return float(value)


def _count(record: dict[str, Any], name: str, where: str) -> int | None:
    value = _number(record, name, where)
    if value is not None and not value.is_integer():
        raise ConfigError(f"{where}: {name} must be a whole number, got {value:g}")
    return None if value is None else int(value)
