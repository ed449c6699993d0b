"""Resolution of model names to files, and its errors."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import httpx2
import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

import chairlift
from chairlift.errors import ModelLoadError
from chairlift.loading.fetch import DEFAULT_MODEL
from chairlift.loading.model_source import FolderSource, GGUFSource
from chairlift.loading.resolve import model_root, resolve_model
from chairlift.sampling_params import SamplingDefaults
from support.gguf_files import write_gguf

CPU = torch.device("cpu")


def test_default_model(smollm2_gguf: Path) -> None:
    sampling = SamplingDefaults(temperature=0.2, top_p=0.9)
    files = GGUFSource(smollm2_gguf, DEFAULT_MODEL, sampling)
    assert resolve_model(None) == resolve_model(DEFAULT_MODEL) == files
    config = resolve_model(None).config()
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)


def test_the_root_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_root(None) == model_root(DEFAULT_MODEL) == "HuggingFaceTB/SmolLM2-135M-Instruct"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    assert model_root("m") == str(tmp_path.resolve() / "m")
    assert model_root("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


def test_gguf_file_under_any_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"output_norm.weight": torch.ones(64)})
    assert resolve_model(str(path)) == GGUFSource(path, "m")
    blob = path.rename(tmp_path / "sha256-abc")
    files = resolve_model(str(blob))
    assert isinstance(files, GGUFSource)
    weights = files.weights(files.config(), torch.float32, CPU)
    assert torch.equal(weights.tensor("model.norm.weight", (64,)), torch.ones(64))


def eps_of(path: Path) -> float:
    norm = resolve_model(str(path)).config().final_norm
    assert norm is not None
    return norm.eps


def test_replaced_gguf_file_is_opened_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {})
    assert eps_of(path) == pytest.approx(1e-6)
    path.unlink()
    write_gguf(path, {}, metadata={"llama.attention.layer_norm_rms_epsilon": 0.5, "some.padding": "x" * 99})
    assert eps_of(path) == 0.5


@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 2500, "owner/" + "x" * 200, "x" * 5000 + ".gguf", "a\0b"])
def test_name_that_no_file_can_have_is_a_model_load_error(name: str) -> None:
    with pytest.raises(
        ModelLoadError, match=r"a model is one of smollm2-135m-instruct, gemma-3-270m \(the first is the default\)"
    ) as caught:
        resolve_model(name)
    assert len(str(caught.value)) < 400


def test_folder(tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model_dir("qwen3")
    files = resolve_model(str(folder))
    assert files == FolderSource(folder, folder.name)
    assert files.config().name == "qwen3"
    monkeypatch.chdir(folder)
    assert resolve_model(".").name == folder.name


def test_config_json_without_weights(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "opt-13b.json"
    file.write_text((tiny_model_dir("opt") / "config.json").read_text())
    files = resolve_model(str(file))
    assert files == FolderSource(file, "opt-13b")
    config = files.config()
    assert config.name == "opt"
    with pytest.raises(ModelLoadError, match=r"opt-13b\.json: .*--load-format dummy"):
        files.weights(config, torch.float32, CPU)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: is missing"):
        files.tokenizer()


def test_names_that_match_no_model_are_errors(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    for model, problem in [
        ("", "no such file or folder; a model is"),
        ("no-such-model", "on the Hugging Face hub write OWNER/no-such-model; a model is"),
        ("a/b:Q4_K_M", "no such file or folder; on the Hugging Face hub write a/b, or a/b/FILE.gguf for"),
        ("hf.co/a/b:latest", "hub write a/b, or"),
        ("https://huggingface.co/a/b", "hub write a/b, or"),
        ("a:x:0", "no such file or folder; a model is"),
        (str(tmp_path / "none.gguf"), r"none\.gguf': there is no such file"),
        (str(tmp_path / "notes.txt"), r"notes\.txt: is neither a GGUF file nor a config\.json"),
        (str(tmp_path / "empty"), r"empty: contains no config\.json"),
    ]:
        with pytest.raises(ModelLoadError, match=problem):
            resolve_model(model)


def test_names_of_folders_and_of_files_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"contains no config\.json; name the GGUF file: \S+b\.gguf"):
        resolve_model(str(tmp_path))
    # huggingface_hub rejects the name before it connects, with a ValueError.
    with pytest.raises(ModelLoadError, match=r"Invalid filename '\.\./c\.gguf'"):
        resolve_model("a/b/../c.gguf")


def test_error_names_a_damaged_configuration(tmp_path: Path) -> None:
    for text, problem in [
        ("{", "cannot be read as JSON"),
        ("[]", "must contain a JSON object"),
        ("{}", "architectures"),
    ]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelLoadError, match=rf"config\.json: .*{problem}"):
            resolve_model(str(tmp_path)).config()


def test_hub_name(tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[Any] = []

    def download(name: str, **patterns: list[str]) -> str:
        downloads.append((name, patterns))
        return str(tiny_model_dir("llama"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    files = resolve_model("org/name-1.5B")
    assert files == FolderSource(tiny_model_dir("llama"), "org/name-1.5B")
    ((name, patterns),) = downloads
    assert name == "org/name-1.5B"
    given = ["config.json", "model-1.safetensors", "original/model.safetensors", "pytorch_model.bin", "README.md"]
    assert list(filter_repo_objects(given, **patterns)) == ["config.json", "model-1.safetensors"]


RESPONSE: Any = httpx.Response(404, request=httpx.Request("GET", "https://example.org"))


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (errors.GatedRepoError("gated", response=RESPONSE), "terms are accepted.*huggingface.co/org/name.*log in"),
        (errors.RepositoryNotFoundError("none", response=RESPONSE), "does not have it; check the spelling"),
        (errors.LocalEntryNotFoundError("not cached"), "cannot be reached; check the network.*local folder"),
        (errors.OfflineModeIsEnabled("offline"), "cannot be reached"),
        (ConnectionError("refused"), "cannot be reached"),
        (httpx.ConnectError("Name or service not known"), "cannot be reached"),
        (httpx2.ReadTimeout("no answer"), "cannot be reached"),
        (
            errors.HfHubHTTPError("500 server error", response=RESPONSE),
            "download from the Hugging Face hub failed: 500 server error",
        ),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("Invalid filename '../c.gguf'"), r"failed: Invalid filename '\.\./c\.gguf'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_hub_errors(error: Exception, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelLoadError, match=problem) as caught:
        resolve_model("org/name")
    assert "'org/name'" in str(caught.value)


def test_large_packages_are_imported_on_first_use() -> None:
    code = (
        "import sys, chairlift.loading.resolve\n"
        "heavy = {'torch', 'numpy', 'gguf', 'huggingface_hub', 'tokenizers', 'transformers', 'rich', 'jinja2'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_resolve_model_distinguishes_a_gguf_file_from_a_folder() -> None:
    source = Path(chairlift.__file__).parent
    naming = {path for path in source.rglob("*.py") if re.search("GGUFSource|FolderSource", path.read_text())}
    assert naming == {source / "loading" / "model_source.py", source / "loading" / "resolve.py"}
