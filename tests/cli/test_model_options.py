"""Tests the options of `chairlift serve` that name several models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import ConfigError
from chairlift.server.models.model_options import ModelSpec
from support.command_runner import invoke, run_arguments


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the server is started with."""
    taken: dict[str, Any] = {}
    monkeypatch.setattr("chairlift.server.serve.run", lambda *given: taken.update(run_arguments(*given)))
    return taken


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three models, of which one is split, and two other files."""
    for name in ("one", "no-model"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "config.json").write_text("{}")
    (tmp_path / "two.gguf").write_bytes(b"GGUF")
    for number in (1, 2):
        (tmp_path / f"parts-0000{number}-of-00002.gguf").write_bytes(b"GGUF")
    (tmp_path / "notes.txt").write_text("")
    return tmp_path


def serve(*arguments: str, **environment: str) -> None:
    result = invoke(["serve", *arguments], environment)
    if result.exception is not None:
        raise result.exception


def names(served: dict[str, Any]) -> dict[str, str | None]:
    specs: list[ModelSpec] = served["models"]
    return {spec.name: spec.config.model for spec in specs}


def test_one_model_is_loaded_at_the_start(served: dict[str, Any], folder: Path) -> None:
    serve(str(folder / "one"))
    assert (served["models"], served["config"].model) == (None, str(folder / "one"))
    serve()
    assert (served["models"], served["config"].model) == (None, None)


def test_several_models_and_a_folder(served: dict[str, Any], folder: Path) -> None:
    serve(str(folder / "one"), "some/hub-model", "--max-num-seqs", "3", "--models-memory-bytes", "2GiB")
    assert names(served) == {"one": str(folder / "one"), "some/hub-model": "some/hub-model"}
    assert [spec.config.max_num_seqs for spec in served["models"]] == [3, 3]
    assert [spec.keep_alive for spec in served["models"]] == [300.0, 300.0]
    assert served["memory_budget"] == 2 << 30
    parts = str(folder / "parts-00001-of-00002.gguf")
    serve("--model-dir", str(folder))
    assert names(served) == {"one": str(folder / "one"), "parts": parts, "two": str(folder / "two.gguf")}
    serve("two", "parts", "--model-dir", str(folder), "--keep-alive", "-1")
    assert names(served) == {"two": str(folder / "two.gguf"), "parts": parts}
    assert served["models"][0].keep_alive is None


def test_options_of_single_models_in_a_file(served: dict[str, Any], folder: Path) -> None:
    config = folder / "serve.yaml"
    config.write_text(
        f"""
        model: [{folder}/one]
        max-num-seqs: 5
        keep-alive: 60
        models:
          small:
            model: {folder}/two.gguf
            aliases: [s, tiny]
            quantization: int8
            kv-cache-memory-bytes: 1GiB
            keep-alive: -1
            reasoning-parser: none
          {folder}/two.gguf:
        """
    )
    serve("--config", str(config))
    one, small, plain = served["models"]
    assert (one.name, one.config.max_num_seqs, one.keep_alive, one.api.reasoning_parser) == ("one", 5, 60.0, "auto")
    assert (small.name, small.aliases, small.keep_alive) == ("small", ("s", "tiny"), None)
    assert (small.config.quantization, small.config.kv_cache_memory_bytes) == ("int8", 1 << 30)
    assert (small.config.max_num_seqs, small.api.reasoning_parser) == (5, "none")
    assert plain.config.model == str(folder / "two.gguf")


def test_a_path_with_spaces_in_the_environment_is_one_model(served: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "my model"
    path.mkdir()
    serve(CHAIRLIFT_MODEL=str(path))
    assert served["config"].model == str(path)
    serve(CHAIRLIFT_MODEL="some/model other/model")
    assert names(served) == {"some/model": "some/model", "other/model": "other/model"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "[1]"], "models must be a JSON object such as"),
        (["--models", '{"a": 1}'], "models: a: must have options as `name: value`, got 1"),
        (["--models", '{"a": {"quantisation": "int8"}}'], "quantisation is not an option: did you mean quantization?"),
        (
            ["--models", '{"a": {"quantization": "int7"}}'],
            "models: a: quantization must be one of int8, q8_0, q4_0, q4_1, got 'int7'",
        ),
        (
            ["--models", '{"a": {"max_num_seqs": "many"}}'],
            "models: a: max-num-seqs must be an integer, got 'many'",
        ),
        (["--models", '{"a": {"keep_alive": -2}}'], "keep_alive must be a number of seconds, or -1 for no limit"),
        (
            ["--models", '{"a": {"keep_alive": NaN}}'],
            "keep_alive must be a number of seconds, or -1 for no limit, got nan",
        ),
        (["a", "--keep-alive", "inf"], "keep_alive must be a number of seconds, or -1 for no limit, got inf"),
        (["--models", '{"a": {}, "b": {"aliases": ["a"]}}'], "two models have the name 'a': a and b"),
        (["a", "b", "--lora-modules", "b=./sql"], "two models or LoRA adapters have the name 'b': ./sql and b"),
        (
            ["a", "--lora-modules", "a=./sql"],
            "adapters have the name 'a': a and ./sql; give one of them another name with --models or --lora-modules",
        ),
        (
            ["x/a", "--served-model-name", "b", "--lora-modules", "b=./sql"],
            "two models or LoRA adapters have the name 'b': x/a and ./sql",
        ),
        (
            ["--models", '{"a": {"lora-modules": ["b=./sql"]}, "b": {}}'],
            "two models or LoRA adapters have the name 'b': ./sql and b",
        ),
        (["a", "b", "--lora-modules", "sql=./sql"], "LoRA adapters have the name 'sql': ./sql and ./sql; give"),
        (["x/one", "y/two", "--event-log", "log"], "event_log is one file, and there are 2 models"),
        (["--models-memory-bytes", "lots"], "models_memory_bytes must be a positive amount"),
        (["--model-dir", "nowhere"], "model_dir=nowhere: No such file or directory"),
        (["a", "b", "--device", "cuda"], "several models on device=cuda need --models-memory-bytes"),
    ],
)
def test_wrong_options(arguments: list[str], message: str, served: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r".") as failed:
        serve(*arguments)
    assert message in str(failed.value)
    assert not served


def test_a_folder_without_models(served: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"contains no model: a model is a folder with config.json or a .gguf file"):
        serve("--model-dir", str(tmp_path))
