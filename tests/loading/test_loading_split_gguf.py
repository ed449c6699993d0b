"""Split GGUF files: a model is loaded whole from all of its parts, or refused by the name of what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
import transformers

from chairlift.errors import ModelLoadError
from chairlift.loading.gguf_file import GGUFFile
from chairlift.loading.model_source import GGUFSource
from chairlift.loading.resolve import model_name, resolve_model
from support.gguf_files import finish, gguf_name, write_gguf

NAMES = [f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def state(tiny_model_dir: Callable[..., Path]) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen3"))
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.fixture
def folder(tmp_path: Path, state: dict[str, torch.Tensor]) -> Path:
    """A folder with the three parts of a model, whose LM head is in the last one."""
    tensors = {gguf_name(name): tensor for name, tensor in state.items()}
    metadata = {"qwen3.attention.key_length": 16, "qwen3.attention.value_length": 16}
    write_gguf(tmp_path / "m.gguf", tensors, arch="qwen3", metadata=metadata, split_max_tensors=-(-len(tensors) // 3))
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    return tmp_path


def rewrite(path: Path, **split: int) -> None:
    """Write a part without tensors, with other values of `split.no`, `split.count` and `split.tensors.count`."""
    writer = gguf.GGUFWriter(path, "qwen3")
    for key, value in split.items():
        writer.add_uint16(f"split.{key.replace('_', '.')}", value)
    finish(writer, path)


@pytest.mark.parametrize("named", NAMES)
def test_any_part_names_the_whole_model(folder: Path, state: dict[str, torch.Tensor], named: str) -> None:
    files = resolve_model(str(folder / named))
    assert files == GGUFSource(folder / NAMES[0], "m")
    assert model_name(str(folder / named)) == "m"
    config = files.config()
    assert not config.tie_word_embeddings
    weights = files.weights(config, torch.float32, torch.device("cpu"))
    for name, tensor in state.items():
        assert torch.equal(weights.tensor(name, tuple(tensor.shape)), tensor), name
    assert weights.unused() == []


def test_tensors_are_those_of_all_parts(folder: Path) -> None:
    file = GGUFFile(folder / NAMES[1])
    parts = [gguf.GGUFReader(folder / name) for name in NAMES]
    assert list(file.tensors) == [tensor.name for part in parts for tensor in part.tensors]
    for part in parts:
        for tensor in part.tensors:
            assert np.array_equal(file.raw(tensor.name).ravel(), tensor.data.view(np.uint8).ravel())
    with pytest.raises(KeyError):
        file.raw("none")


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_error_names_the_missing_part(folder: Path, missing: int) -> None:
    (folder / NAMES[missing]).unlink()
    named = folder / NAMES[1 if missing != 1 else 0]
    for load in (lambda: resolve_model(str(named)), lambda: GGUFFile(named)):
        with pytest.raises(ModelLoadError, match=rf"one of 3 parts of a model, and {NAMES[missing]} is missing in"):
            load()


def test_a_renamed_part_is_not_a_whole_model(folder: Path) -> None:
    shutil.copy(folder / NAMES[0], folder / "model.gguf")
    with pytest.raises(ModelLoadError, match=r"is a whole file by its name, but part 1 of 3 by its header"):
        resolve_model(str(folder / "model.gguf")).config()


def test_parts_with_changed_names_are_refused(folder: Path) -> None:
    first, second, spare = folder / NAMES[0], folder / NAMES[1], folder / "spare"
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    with pytest.raises(ModelLoadError, match=r"00001-of-00003\.gguf: is part 1 of 3 by its name, but part 2 of 3"):
        GGUFFile(first)


@pytest.mark.parametrize(
    ("split", "problem"),
    [
        ({"no": 2, "count": 4}, "part 3 of 3 by its name, but part 3 of 4"),
        ({}, "part 3 of 3 by its name, but part 1 of 1"),
        ({"no": 2, "count": 3}, r"has \d+ tensors \(split\.tensors\.count\), but its 3 parts have \d+"),
    ],
)
def test_parts_of_different_models_are_refused(folder: Path, split: dict[str, Any], problem: str) -> None:
    rewrite(folder / NAMES[2], **split)
    with pytest.raises(ModelLoadError, match=problem):
        GGUFFile(folder / NAMES[0])


def test_a_tensor_in_two_parts_is_an_error(tmp_path: Path) -> None:
    for index in range(2):
        path = tmp_path / f"m-{index + 1:05}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", 2)
        writer.add_tensor("same", np.zeros(4, np.float32))
        finish(writer, path)
    with pytest.raises(ModelLoadError, match=r"00002-of-00002\.gguf: damaged: tensor same is in an earlier part"):
        _ = GGUFFile(path).tensors


def test_a_single_part_is_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00001.gguf"
    rewrite(path, no=0, count=1, tensors_count=0)
    assert GGUFFile(path).metadata["split.count"] == 1
    assert model_name(str(path)) == "m"


def test_all_parts_are_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads: list[str] = []

    def download(name: str, file: str) -> str:
        downloads.append(f"{name}: {file}")
        return str(folder / Path(file).name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    files = resolve_model(f"org/name/Q8/{NAMES[1]}")
    assert files == GGUFSource(folder / NAMES[0], "m")
    assert downloads == [f"org/name: Q8/{name}" for name in NAMES]
