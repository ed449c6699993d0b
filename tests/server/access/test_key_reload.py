"""Tests that changes of the key file take effect while the server runs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from chairlift.errors import OverloadedError
from chairlift.server.access.admission import AdmissionController
from chairlift.server.access.keys import key_record, load_keys, new_secret, to_toml


def write(path: Path, *records: dict[str, object]) -> None:
    """Replace the file, as editors and configuration management do."""
    new = path.with_suffix(".new")
    new.write_text("\n\n".join(map(to_toml, records)))
    new.replace(path)


def test_added_removed_and_changed_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, (alice, bob) = tmp_path / "keys.toml", (new_secret(), new_secret())
    write(path, key_record(alice, name="alice", max_concurrent=1))
    keys = load_keys(path)
    admission = AdmissionController(None, keys)
    found = keys.find(alice)
    assert found is not None
    permit = admission.open_call(found)
    with pytest.raises(OverloadedError, match="max_concurrent=1"):
        admission.open_call(found)

    changed = key_record(alice, name="alice", max_concurrent=2, requests_per_minute=1)
    write(path, changed, key_record(bob, name="bob"))
    asyncio.run(keys.reload())
    assert keys.find(bob) is not None
    admission.open_call(found).close()
    admission.count_request(found)
    write(path, changed, key_record(bob, name="robert"))
    asyncio.run(keys.reload())
    with pytest.raises(OverloadedError, match="requests_per_minute=1"):
        admission.count_request(found)

    version = path.stat()
    path.write_text(path.read_text().replace("robert", "rupert"))
    os.utime(path, ns=(version.st_atime_ns, version.st_mtime_ns))
    assert asyncio.run(keys.reload()) == f"2 API keys were read from {path}", "also if the change cannot be seen"
    assert "rupert" in keys.by_tenant
    path.write_text("[[keys]]\nname = 1\n")
    with caplog.at_level("ERROR"):
        asyncio.run(keys.reload())
    assert f"api_key_file={path}: the API keys were not changed" in caplog.text
    assert keys.find(bob) is not None

    write(path, key_record(bob, name="bob", weight=2.0))
    with caplog.at_level("WARNING"):
        asyncio.run(keys.reload())
    assert "weights of API keys take effect after a restart" in caplog.text
    assert keys.find(alice) is None
    permit.close()
