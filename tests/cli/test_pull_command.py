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

from support.command_runner import invoke
from support.waiting import AMPLE_SECONDS

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
def environment(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of a process that uses the hub. This process uses it, too."""
    from huggingface_hub import constants

    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    for name, value in {
        "ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(tmp_path / "hub" / "hub"),
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "own"))
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}
    return {**os.environ, **own, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


@pytest.mark.usefixtures("environment")
def test_a_model_of_the_hub_is_pulled_once(hub: FakeHub) -> None:
    pulled = invoke(["pull", NAME])
    assert pulled.exit_code == 0, pulled.output
    folder = Path(pulled.stdout.strip())
    assert folder.name == COMMIT
    assert (folder / "config.json").read_bytes() == hub.files["config.json"]
    assert hub.num_sent["quantized/tiny.gguf"] == 0
    assert invoke(["pull", NAME]).stdout == pulled.stdout


def test_an_interrupted_download_is_repeated(environment: dict[str, str], hub: FakeHub) -> None:
    hub.stall_after = 21 << 20
    file = f"{NAME}/quantized/tiny.gguf"
    command = [sys.executable, "-m", "chairlift", "pull", file]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    assert hub.is_stalled.wait(AMPLE_SECONDS)
    time.sleep(1)
    process.kill()
    process.wait()
    hub.stop_stalling()
    before = hub.num_sent["quantized/tiny.gguf"]
    assert before == 21 << 20
    pulled = invoke(["pull", file])
    assert pulled.exit_code == 0, pulled.output
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
    command = [sys.executable, "-m", "chairlift", "pull", model]
    failed = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=AMPLE_SECONDS, check=False
    )
    assert failed.returncode == 2
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr
