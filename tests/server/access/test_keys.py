"""API keys: sources of keys, lookup of secrets, and errors in key files."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift.errors import ConfigError
from chairlift.server.access.access_options import AccessOptions, is_loopback
from chairlift.server.access.call import Call
from chairlift.server.access.call_checks import key_filter
from chairlift.server.access.keys import Key, KeyRing, digest, key_record, load_keys, new_secret, to_toml
from chairlift.slo import SLO


def test_a_key_file_round_trips(tmp_path: Path) -> None:
    secrets = [new_secret() for _ in range(3)]
    records = [
        key_record(secrets[0], name="alice", admin=True),
        key_record(secrets[1], name="bob", weight=2.5, requests_per_minute=60, max_concurrent=4),
        key_record(secrets[2], name="carol-2", tokens_per_minute=1000.0, slo={"ttft_ms": 500, "tpot_ms": 50}),
    ]
    toml, jsonl = tmp_path / "keys.toml", tmp_path / "keys.jsonl"
    toml.write_text("\n\n".join(map(to_toml, records)))
    jsonl.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    for path in (toml, jsonl):
        ring = load_keys(path)
        assert len(ring) == 3
        slo = SLO(500, 50)
        assert list(ring.by_tenant.values()) == [
            Key("alice", digest(secrets[0]), is_admin=True),
            Key("bob", digest(secrets[1]), weight=2.5, requests_per_minute=60.0, max_concurrent=4),
            Key("carol-2", digest(secrets[2]), tokens_per_minute=1000.0, slo=slo),
        ]
        assert [ring.find(secret) for secret in secrets] == list(ring.by_tenant.values())
        assert ring.find(secrets[1] + " ") is None
        assert ring.find("") is None
        assert ring.tenant_weights() == {"bob": 2.5}
        assert all(secret not in path.read_text() for secret in secrets)


def test_secrets_from_the_environment_have_names() -> None:
    ring = load_keys(None, ["plain", "ops=s3cret", "another"])
    for secret, name in (("plain", "default"), ("s3cret", "ops"), ("another", "default-3")):
        assert ring.find(secret) == Key(name, digest(secret), is_admin=True, is_short=True)
    assert ring.tenant_weights() is None
    assert not KeyRing()
    assert load_keys(None, ["ops=c2VjcmV0Cg=="]).find("c2VjcmV0Cg==") is not None


@pytest.mark.parametrize("given", ["c2VjcmV0Cg==", "c2VjcmV0Cgo=", "ops=", "=secret", ""])
def test_base64_padding_of_a_secret_is_not_a_secret(given: str) -> None:
    with pytest.raises(ConfigError, match="NAME=SECRET") as caught:
        load_keys(None, [given])
    assert not given.strip("=") or given not in str(caught.value)


@pytest.mark.parametrize("secret", ["schlüssel-schlüssel", "with a space", "with\ta tab", "\udcff" * 20])
def test_a_secret_that_clients_cannot_send_is_rejected(secret: str) -> None:
    expected = r"api_key 2 \(ops\) must consist of printable ASCII .* create a key with `chairlift key ops`"
    with pytest.raises(ConfigError, match=expected) as caught:
        load_keys(None, ["x" * 20, f"ops={secret}"])
    assert secret not in str(caught.value)


def test_secrets_with_other_characters_match_by_their_utf8_bytes() -> None:
    """The last byte of "à" is a space in Latin-1."""
    ring = KeyRing([Key(f"k{i}", digest(secret)) for i, secret in enumerate(("schlüssel", "voilà"))])
    for value, status in ((b"schl\xc3\xbcssel", 200), (b"schl\xfcssel", 401), (b"voil\xc3\xa0", 200), (b"voil", 401)):
        for headers in ({"authorization": b"Bearer " + value}, {"x-api-key": value}):
            assert asyncio.run(status_of(key_filter(answer_ok, ring), headers)) == status


async def answer_ok(scope: Scope, receive: Receive, send: Send) -> None:
    await Response()(scope, receive, send)


async def status_of(app: ASGIApp, headers: dict[str, bytes]) -> int:
    async def opened(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {"call": Call("GET", scope["path"])}}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(opened), base_url="http://server") as client:
        return (await client.get("/v1/models", headers=headers)).status_code


def test_one_warning_names_all_keys_with_short_secrets(caplog: pytest.LogCaptureFixture) -> None:
    ring = load_keys(None, ["ops=horse", "long=" + "x" * 16, "tiny=x"])
    assert not caplog.records
    ring.log_short_secrets()
    (record,) = caplog.records
    assert "less than 16 characters can be guessed: ops, tiny;" in record.message
    assert "horse" not in record.message


HASH = "sha256:" + digest("x").hex()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "contains no key"),
        ("keys = 3", "array of tables"),
        ("not toml", "neither TOML"),
        ("keys = [1]", "key 1: Expected `object`, got `int`"),
        (f'[[keys]]\nname = "a b"\nhash = "{HASH}"', r"matching regex .* at `\$\.name`, got 'a b'"),
        ('[[keys]]\nname = "a"', "missing required field `hash`"),
        ('[[keys]]\nname = "a"\nhash = "sha256:12"', "key 1: hash must be sha256: and 64 of 0-9 and a-f, got 9 "),
        (
            f'[[keys]]\nname = "a"\nhash = "{HASH}"\nadmin = "yes"',
            r"Expected `bool`, got `str` - at `\$\.admin`, got 'yes'; the fields are name, hash, admin",
        ),
        (f'[[keys]]\nname = "a"\nhash = "{HASH}"\nweight = 0', r"Expected `float` > 0\.0 - at `\$\.weight`"),
        (f'[[keys]]\nname = "a"\nhash = "{HASH}"\nweight = inf', r"Expected `float` <= .* at `\$\.weight`"),
        (
            f'[[keys]]\nname = "a"\nhash = "{HASH}"\nmax_concurrent = 1.5',
            r"Expected `int \| null`, got `float` - at `\$\.max_concurrent`",
        ),
        (f'[[keys]]\nname = "sk-a/b"\nhash = "{HASH}"', r"matching regex .* at `\$\.name`; the fields"),
        (f'[[keys]]\nname = "a"\nhash = "{HASH}"\nmodels = ["b", 1]', r"`int` - at `\$\.models\[1\]`; the fields"),
        (f'[[keys]]\nname = "a"\nhash = "{HASH}"\nmodels = [""]', r"`str` of length >= 1 - at `\$\.models\[0\]`"),
        (f'[[keys]]\nname = "a"\nhash = "{HASH}"\nsecret = "x"', "unknown field `secret`"),
        (
            f'[[keys]]\nname = "a"\nhash = "{HASH}"\ncpu_seconds_per_minute = 6',
            "unknown field `cpu_seconds_per_minute`",
        ),
        (f'[[keys]]\nname = "a"\nhash = "{HASH}"\n' * 2, "keys.toml: API keys 1 and 2 have the same name 'a'"),
        (
            f'[[keys]]\nname = "a"\nhash = "{HASH}"\n[[keys]]\nname = "b"\nhash = "{HASH}"',
            "API keys 1 and 2 have the same secret",
        ),
    ],
)
def test_errors_in_a_key_file_name_the_problem(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        load_keys(path)


def test_a_missing_key_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_keys(Path("no-such-file.toml"))
    with pytest.raises(ConfigError, match="api_key 1 must be"):
        load_keys(None, ["=x"])


def test_other_machines_are_served_only_with_a_key_or_an_explicit_option(tmp_path: Path) -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        assert is_loopback(host)
        AccessOptions().check_host(host)
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(ConfigError, match="--api-key-file"):
            AccessOptions().check_host(host)
        AccessOptions(load_keys(None, ["x"])).check_host(host)
        AccessOptions(allow_unauthenticated=True).check_host(host)
    with pytest.raises(ConfigError, match="no effect"):
        AccessOptions(load_keys(None, ["x"]), allow_unauthenticated=True)
    with pytest.raises(ConfigError, match="must be given together"):
        AccessOptions(ssl_certfile=tmp_path / "cert.pem")
    with pytest.raises(ConfigError, match="cannot be read"):
        AccessOptions(ssl_certfile=tmp_path / "cert.pem", ssl_keyfile=tmp_path / "key.pem")


def test_keys_do_not_replace_the_options_with_keys(tmp_path: Path) -> None:
    keys = load_keys(None, ["x"])
    for option in ({"api_key": ["y"]}, {"api_key_file": tmp_path / "keys.toml"}):
        with pytest.raises(ConfigError, match="keys cannot be combined with api_key or api_key_file"):
            AccessOptions(keys, **option)
    (tmp_path / "keys.toml").write_text(to_toml(key_record("z", name="ann")))
    options = AccessOptions(api_key=["y"], api_key_file=tmp_path / "keys.toml")
    assert replace(options).keys.by_tenant.keys() == {"ann", "default"}, "a copy has the same keys"


def test_a_key_may_be_limited_to_models(tmp_path: Path) -> None:
    record = key_record(new_secret(), name="bob", models=["a", "b"])
    path = tmp_path / "keys.toml"
    path.write_text(to_toml(record))
    assert load_keys(path).by_tenant["bob"].models == {"a", "b"}
    for wrong in ("a", [], [1]):
        with pytest.raises(ConfigError, match=r"at `\$\.models"):
            key_record(new_secret(), name="bob", models=wrong)
