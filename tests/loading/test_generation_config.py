"""Sampling defaults are read from the files of a model, a folder or overriding values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import ConfigError
from chairlift.loading.generation_config import load_sampling_defaults
from chairlift.loading.gguf_file import GGUFFile
from chairlift.loading.model_source import FolderSource, GGUFSource
from chairlift.loading.resolve import resolve_model
from chairlift.sampling_params import SamplingDefaults, SamplingParams
from support.gguf_files import write_gguf

ALL: dict[str, Any] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
}


def folder_with(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "eos_token_id": 2, **values}))
    return folder


def test_fields_of_the_folder_of_the_model(tmp_path: Path) -> None:
    files = FolderSource(folder_with(tmp_path / "m", ALL), "m")
    assert load_sampling_defaults(files.defaults, "auto") == SamplingDefaults(**ALL)
    assert load_sampling_defaults(files.defaults, "vllm") == SamplingDefaults()
    other = folder_with(tmp_path / "other", {"top_k": 5, "top_p": None})
    assert load_sampling_defaults(files.defaults, str(other)) == SamplingDefaults(top_k=5)
    assert load_sampling_defaults(FolderSource(tmp_path, "m").defaults, "auto") == SamplingDefaults()
    assert load_sampling_defaults(FolderSource(files.path / "config.json", "m").defaults, "auto") == SamplingDefaults()


def test_keys_of_a_gguf_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = {"temp": 0.2, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "penalty_repeat": 1.1, "mirostat": 2}
    path = write_gguf(tmp_path / "m.gguf", {}, metadata={f"general.sampling.{key}": keys[key] for key in keys})
    files = GGUFSource(path, "m", SamplingDefaults(temperature=1.5, max_new_tokens=7))
    expected = SamplingDefaults(0.2, 0.9, 20, 0.05, 1.1, max_new_tokens=7)
    assert load_sampling_defaults(files.defaults, "auto") == expected
    assert "not applied: general.sampling.mirostat" in caplog.text
    assert load_sampling_defaults(files.defaults, "vllm") == SamplingDefaults()


def test_the_default_model(smollm2_gguf: Path) -> None:
    metadata = GGUFFile(smollm2_gguf).metadata
    assert not any(key.startswith("general.sampling.") for key in metadata)
    files = resolve_model(None)
    assert load_sampling_defaults(files.defaults, "auto") == SamplingDefaults(temperature=0.2, top_p=0.9)
    assert load_sampling_defaults(files.defaults, "vllm") == SamplingDefaults()
    by_path = load_sampling_defaults(resolve_model(str(smollm2_gguf)).defaults, "auto")
    assert by_path == SamplingDefaults()


def test_overriding_values(tmp_path: Path) -> None:
    files = FolderSource(folder_with(tmp_path, ALL), "m")
    override = {"temperature": 0, "max_new_tokens": None}
    assert load_sampling_defaults(files.defaults, "auto", override) == SamplingDefaults(**{**ALL, "temperature": 0})
    assert load_sampling_defaults(files.defaults, "vllm", override) == SamplingDefaults(temperature=0)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"temperature": -0.5}, r"temperature must be in \[0, 100\], got -0.5"),
        ({"top_p": 1.5}, r"top_p must be in \[0, 1\], got 1.5"),
        ({"top_k": 2.5}, "top_k must be an integer, got 2.5"),
        ({"min_p": "x"}, "min_p must be a finite number, got 'x'"),
        ({"repetition_penalty": 0}, r"repetition_penalty must be in \(0, 100\], got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_values_out_of_range_are_named_and_not_applied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, values: dict[str, Any], problem: str
) -> None:
    files = FolderSource(folder_with(tmp_path, {"top_p": 0, "min_p": 0.5} | values), "m")
    valid = {name: value for name, value in {"top_p": 0, "min_p": 0.5}.items() if name not in values}
    assert load_sampling_defaults(files.defaults, "auto") == SamplingDefaults(**valid)
    (record,) = caplog.records
    assert re.search(f"{tmp_path}/generation_config.json: {problem}; correct it; it is not applied", record.message)
    with pytest.raises(ConfigError, match=f"override_generation_config: {problem}; correct it"):
        load_sampling_defaults(files.defaults, "vllm", values)


def test_a_gguf_value_out_of_range(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, metadata={"general.sampling.temp": -1.0, "general.sampling.top_k": 3})
    assert load_sampling_defaults(GGUFSource(path, "m").defaults, "auto") == SamplingDefaults(top_k=3)
    assert "m.gguf: general.sampling.temp must be in [0, 100], got -1.0" in caplog.text


def test_unknown_sources(tmp_path: Path) -> None:
    files = FolderSource(tmp_path, "m")
    with pytest.raises(ConfigError, match=r"vllm or a folder with generation_config.json; got '/nowhere'"):
        load_sampling_defaults(files.defaults, "/nowhere")
    with pytest.raises(ConfigError, match=r"override_generation_config may have temperature, .*; got top_n"):
        load_sampling_defaults(files.defaults, "auto", {"top_n": 1})


def test_the_values_of_a_request_take_precedence() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20, max_new_tokens=5)
    assert defaults.params(temperature=0) == SamplingParams(temperature=0, top_k=20)
