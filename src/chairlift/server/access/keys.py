"""API keys: their secrets, limits and files, which are read again when they change.

A key is a long random secret, of which a server keeps only the SHA-256 digest. The secret of a request is hashed and
compared with the digest of every key, in constant time.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from chairlift.errors import ConfigError, RequestError
from chairlift.slo import SLO
from chairlift.system.input_files import read_text

logger = logging.getLogger("chairlift")

MIN_SECRET_CHARACTERS: Final = 16
"""The minimum length of a secret in characters. The server warns of shorter ones, because they can be guessed."""
POLL_SECONDS: Final = 1.0

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HASH_PREFIX: Final = "sha256:"
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]


class _KeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(pattern=rf"^{_NAME.pattern}\Z")]
    hash: Annotated[str, msgspec.Meta(pattern=rf"^({_HASH_PREFIX})?[0-9a-f]{{64}}\Z")]
    admin: bool = False
    weight: _Positive = 1.0
    models: Annotated[frozenset[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)] | None = None
    requests_per_minute: _Positive | None = None
    tokens_per_minute: _Positive | None = None
    max_concurrent: Annotated[int, msgspec.Meta(ge=1)] | None = None
    slo: Any = None


@dataclass(frozen=True, slots=True)
class Key:
    """One API key as the server stores it, which is in the `Call` of each of its requests.

    Attributes:
        name: the name of the key in messages and logs.
        digest: the SHA-256 digest of the secret.
        is_admin: whether it may read the state of the engine and the requests of all keys.
        models: the names of the models that it may use; None for all.
        requests_per_minute: maximum number of calls per minute; None, here and below, means no limit.
        tokens_per_minute: maximum number of prompt and output tokens of all sequences per minute. The length of an
            output is not known in advance, so a call may exceed the limit; the next calls are rejected until the excess
            is paid back.
        max_concurrent: maximum number of sequences in progress at the same time, one for each answer to each prompt.
        weight: the share of the key under the fair policy, relative to other keys.
        slo: the SLO of its requests that have none.
        is_short: whether the secret is known to have less than MIN_SECRET_CHARACTERS characters. False for a key whose
            secret is given as a hash.
    """

    name: str
    digest: bytes = field(default=b"", repr=False)
    is_admin: bool = False
    models: frozenset[str] | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_concurrent: int | None = None
    weight: float = 1.0
    slo: SLO | None = None
    is_short: bool = False

    @property
    def tenant(self) -> str:
        """The unit of fair scheduling and accounting to which its requests belong."""
        return self.name


ANONYMOUS = Key("", is_admin=True)
"""The key of every request to a server without keys."""

NO_KEY = Key("")
"""The key of requests without a valid one to a server with keys."""


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def new_secret() -> str:
    """A new random secret of 256 bits."""
    return f"sk-{secrets.token_urlsafe(32)}"


def key_record(secret: str, **given: object) -> dict[str, object]:
    """The entry of a key file for a secret, with the other fields whose values are given. Raises ConfigError if
    a field is invalid."""
    fields = {name: value for name, value in given.items() if value is not None}
    record = {"hash": f"{_HASH_PREFIX}{digest(secret).hex()}", **fields}
    parse_key(record, "key")
    return record


def to_toml(record: Mapping[str, object]) -> str:
    """An entry of a key file as TOML. Its values have the same syntax in JSON, except for `=` between key and value."""
    lines = (f"{name} = {json.dumps(value, separators=(', ', ' = '))}" for name, value in record.items())
    return "\n".join(["[[keys]]", *lines])


class KeyRing:
    """All API keys of a server. A server without keys accepts every request as an admin's. Raises ConfigError that
    names two keys with the same name or the same secret.

    Args:
        path: the file of the keys; None without a file.
        load: reads all keys again.
    """

    def __init__(
        self, keys: Iterable[Key] = (), path: Path | None = None, load: Callable[[], KeyRing] | None = None
    ) -> None:
        keys = list(keys)
        self._path, self._load, self._version = path, load, _file_version(path)
        self._reloading = asyncio.Lock()
        self.by_tenant: Mapping[str, Key] = {key.tenant: key for key in keys}
        positions: dict[str | bytes, int] = {}
        for number, key in enumerate(keys, start=1):
            for what, value in ((f"name {key.name!r}", key.name), ("secret", key.digest)):
                if (earlier := positions.setdefault(value, number)) != number:
                    places = f"{'' if path is None else f'{path}: '}API keys {earlier} and {number}"
                    raise ConfigError(f"{places} have the same {what}: change or remove one of them")

    async def watch(self) -> None:
        """Accept the keys of the file after each change of it, until this call is cancelled; returns without a file."""
        while self._path is not None:
            await asyncio.sleep(POLL_SECONDS)
            if _file_version(self._path) != self._version and (done := await self.reload()):
                logger.info("%s", done)

    async def reload(self) -> str:
        """Read the keys of the file. Requests in progress are not affected. A file that is invalid, or from which all
        keys are missing, is reported in the log, and the keys stay as they are.

        Returns:
            What was read, for a log line. Empty if there is no file, or the keys stay as they are.
        """
        if self._load is None:
            return ""
        async with self._reloading:  # An older file that is read slowly must not replace the keys of a newer one.
            self._version = _file_version(self._path)
            try:
                loaded = await asyncio.to_thread(self._load)
            except ConfigError as error:
                logger.error("api_key_file=%s: the API keys were not changed: %s", self._path, error)
                return ""
            if loaded.tenant_weights() != self.tenant_weights():
                logger.warning("new weights of API keys take effect after a restart of the server")
            self.by_tenant = loaded.by_tenant
        return f"{len(loaded)} API keys were read from {self._path}"

    def __len__(self) -> int:
        return len(self.by_tenant)

    def current(self, tenant: str) -> Key:
        """The key that a tenant has now. A tenant that has none any more has no limits."""
        return self.by_tenant.get(tenant) or Key(tenant)

    def identity(self, key: Key) -> tuple[bytes, bool, frozenset[str] | None]:
        """What changes when a key is revoked, replaced by another one of its name, or gets other rights."""
        current = self.current(key.tenant)
        return current.digest, current.is_admin, current.models

    def find(self, secret: str) -> Key | None:
        """The key with this secret, or None. The time does not depend on the position of the key, nor on a match."""
        wanted, found = digest(secret), None
        for key in self.by_tenant.values():
            if hmac.compare_digest(key.digest, wanted):
                found = key
        return found

    def log_short_secrets(self) -> None:
        """Log a warning that names the keys with short secrets."""
        if short := [key.name for key in self.by_tenant.values() if key.is_short]:
            logger.warning(
                "API keys with less than %d characters can be guessed: %s; create long ones with `chairlift key NAME`",
                MIN_SECRET_CHARACTERS,
                ", ".join(short),
            )

    def tenant_weights(self) -> dict[str, float] | None:
        """The weights other than 1, in the form of `EngineConfig.tenant_weights`; None if there are none."""
        return {tenant: key.weight for tenant, key in self.by_tenant.items() if key.weight != 1} or None


def _file_version(path: Path | None) -> tuple[int, int, int] | None:
    try:
        found = None if path is None else path.stat()
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)


def load_keys(path: Path | None, secrets_given: Sequence[str] = ()) -> KeyRing:
    """Load the keys of a file, and add keys that are given as plain text. These are kept only to load the file again.
    Raises ConfigError if the file cannot be read, or an entry or a secret is invalid.

    Args:
        path: a TOML file with an array of tables `keys`, or JSON lines (.jsonl). `hash` is the hexadecimal SHA-256.
        secrets_given: keys as SECRET or NAME=SECRET. They are admin keys.
    """
    records = [] if path is None else _read_records(path)
    keys = [parse_key(record, f"{path}, key {number}") for number, record in enumerate(records, start=1)]
    for number, given in enumerate(secrets_given, start=1):
        name, equals, secret = given.partition("=")
        if not equals:
            name, secret = ("default" if number == 1 else f"default-{number}"), given
        if not secret.strip("=") or not _NAME.fullmatch(name):
            problem = f"api_key {number} must be SECRET, or NAME=SECRET with a name that matches {_NAME.pattern}"
            raise ConfigError(f"{problem}; a secret that ends with = (base64) needs a name")
        if not (secret.isascii() and secret.isprintable()) or " " in secret:
            raise ConfigError(
                f"api_key {number} ({name}) must consist of printable ASCII characters without spaces, because clients "
                f"encode other characters in different ways; create a key with `chairlift key {name}`"
            )
        keys.append(Key(name, digest(secret), is_admin=True, is_short=len(secret) < MIN_SECRET_CHARACTERS))
    if path is not None and not records:
        raise ConfigError(f"api_key_file={path} contains no key: add the entry that `chairlift key NAME` prints")
    return KeyRing(keys, path, None if path is None else partial(load_keys, path, secrets_given))


def _read_records(path: Path) -> list[Any]:
    try:
        text = read_text(path)
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
    """The key of an entry of a key file; raises ConfigError, whose message begins with the place of the entry."""
    try:
        found = msgspec.convert(record, _KeyRecord)
        slo = None if found.slo is None else SLO.from_mapping(found.slo)
    except msgspec.ValidationError as error:
        known = ", ".join(_KeyRecord.__struct_fields__)
        if "`$.hash`" in str(error):
            raise ConfigError(
                f"{where}: hash must be sha256: and 64 of 0-9 and a-f, got {len(str(record['hash']))} characters: "
                "`chairlift key NAME` prints an entry with a new secret and its hash"
            ) from None
        wrong = re.search(r"`\$\.(\w+)`", str(error))
        got = "" if wrong is None or str(record[wrong[1]]).startswith("sk-") else f", got {record[wrong[1]]!r:.100}"
        raise ConfigError(
            f"{where}: {error}{got}; the fields are {known}; see docs/guide/serving.md#require-api-keys"
        ) from None
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from None
    entry = msgspec.structs.asdict(found) | {"slo": slo}
    is_admin, digest = entry.pop("admin"), bytes.fromhex(entry.pop("hash").removeprefix(_HASH_PREFIX))
    return Key(**entry, digest=digest, is_admin=is_admin)
