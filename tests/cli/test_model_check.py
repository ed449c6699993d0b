"""A model that is missing or damaged is reported before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PROGRAM = """
import json, sys
from chairlift.cli.main import run_command
from chairlift.errors import ModelLoadError

for arguments in json.load(sys.stdin):
    try:
        run_command(arguments)
    except ModelLoadError as error:
        print(json.dumps(["torch" in sys.modules, str(error)]))
"""


def test_a_wrong_model_is_reported_without_torch(
    tmp_path: Path, tiny_model_dir: Callable[..., Path], smollm2_gguf: Path
) -> None:
    source, folder, damaged = tiny_model_dir("llama"), tmp_path / "truncated", tmp_path / "damaged"
    truncated = tmp_path / "truncated.gguf"
    with smollm2_gguf.open("rb") as file:
        truncated.write_bytes(file.read(100_000))
    for copy in (folder, damaged):
        copy.mkdir()
        (copy / "config.json").write_bytes((source / "config.json").read_bytes())
    (damaged / "config.json").write_text("{")
    weights = next(source.glob("*.safetensors"))
    (folder / weights.name).write_bytes(weights.read_bytes()[:-10])
    expected = {
        tmp_path / "no.gguf": "no.gguf': there is no such file or folder",
        truncated: "truncated.gguf: truncated:",
        folder: f"{weights.name}: cannot be read (",
        damaged: "config.json: cannot be read as JSON",
    }
    requests = tmp_path / "requests.jsonl"
    requests.write_text("{}\n")
    models = [str(model) for model in expected]
    commands = [
        ["serve", models[0], "--port", "0"],
        ["generate", "hi", "--model", models[1]],
        ["chat", models[2]],
        ["batch", str(requests), "--output", str(tmp_path / "answers.jsonl"), "--model", models[3]],
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(commands), capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(commands), done.stderr
    for (has_torch, message), text in zip(lines, expected.values(), strict=True):
        assert not has_torch
        assert text in message
