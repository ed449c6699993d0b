"""Tests `chairlift pull` with a server that speaks the protocol of the hub."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub

from waiting import AMPLE_SECONDS

NAME = "tiny-org/tiny-model"
LARGE = 24 << 20


@pytest.fixture
def hub(tiny_model_dir: Callable[..., Path]) -> Iterator[FakeHub]:
    folder = tiny_model_dir("llama")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files["quantized/tiny.gguf"] = b"GGUF" + os.urandom(LARGE)
    hub = FakeHub(NAME, files)
    yield hub
    hub.close()


@pytest.fixture
def environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub"), "CHAIRLIFT_CACHE": str(tmp_path / "own")}
    return {**os.environ, **own, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "chairlift", *arguments]


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=environment, capture_output=True, text=True, timeout=AMPLE_SECONDS, check=False
    )


def test_a_model_of_the_hub_is_pulled_once(environment: dict[str, str], hub: FakeHub) -> None:
    pulled = run(environment, "pull", NAME)
    assert pulled.returncode == 0, pulled.stderr
    folder = Path(pulled.stdout.strip())
    assert folder.name == COMMIT
    assert (folder / "config.json").read_bytes() == hub.files["config.json"]
    assert hub.num_sent["quantized/tiny.gguf"] == 0
    assert run(environment, "pull", NAME).stdout == pulled.stdout


def test_an_interrupted_download_is_repeated(environment: dict[str, str], hub: FakeHub) -> None:
    hub.stall_after = 21 << 20
    file = f"{NAME}/quantized/tiny.gguf"
    process = subprocess.Popen(command("pull", file), env=environment, stderr=subprocess.DEVNULL)
    assert hub.is_stalled.wait(AMPLE_SECONDS)
    time.sleep(1)
    process.kill()
    process.wait()
    hub.stop_stalling()
    before = hub.num_sent["quantized/tiny.gguf"]
    assert before == 21 << 20
    pulled = run(environment, "pull", file)
    assert pulled.returncode == 0, pulled.stderr
    content = hub.files["quantized/tiny.gguf"]
    assert Path(pulled.stdout.strip()).read_bytes() == content
    assert hub.num_sent["quantized/tiny.gguf"] - before == len(content)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("tiny-org/other", "does not have it; check the spelling"),
        (f"{NAME}/none.gguf", "has no file 'none.gguf'"),
        ("no such model", "there is no such file or folder"),
    ],
)
def test_an_unknown_model_is_an_error(environment: dict[str, str], model: str, message: str) -> None:
    failed = run(environment, "pull", model)
    assert failed.returncode == 2
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr
