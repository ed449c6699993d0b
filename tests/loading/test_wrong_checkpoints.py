"""Checkpoints that cannot be loaded: each message names what was found, and the way out.

`pytest -s tests/loading/test_wrong_checkpoints.py` prints the table of all messages.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift import EngineConfig
from chairlift.engine.startup import loaded_model
from chairlift.engine.startup.loaded_model import load_model
from chairlift.errors import ChairliftError
from support.gguf_files import finish, gguf_name
from support.gguf_files import write_gguf as write_llama_gguf
from support.native import needs_native
from support.tiny_tokenizer import add_tokenizer

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
UP = "model.layers.1.mlp.up_proj.weight"

Break = Callable[[Path], Path | None]
"""Damages the folder of a loadable checkpoint, and returns the path to load if it is another one."""


def change(**fields: Any) -> Break:
    def write(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))

    return write


def change_tensor(name: str, new: Callable[[torch.Tensor], torch.Tensor | None]) -> Break:
    """Replace a tensor, or remove it where `new` returns None."""

    def write(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        changed = {**tensors, name: new(tensors.get(name, torch.zeros(1)))}
        save_file({key: tensor for key, tensor in changed.items() if tensor is not None}, folder / WEIGHTS)

    return write


def remove(file: str) -> Break:
    return lambda folder: (folder / file).unlink()


def truncate(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def refer_to_a_missing_shard(folder: Path) -> None:
    tensors = dict.fromkeys(load_file(folder / WEIGHTS), "model-00001-of-00002.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {**tensors, UP: "model-00002-of-00002.safetensors"}}))
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")


def keep_only_pickles(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def convert(folder: Path, **options: Any) -> Path:
    """Convert the folder to a GGUF file, without the tokenizer."""
    tensors = {gguf_name(name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    return write_llama_gguf(folder / "model.gguf", tensors, **options)


def convert_to_architecture(name: str) -> Break:
    return lambda folder: convert(folder, arch=name)


def convert_and_truncate(folder: Path) -> Path:
    path = convert(folder)
    truncate(path, path.stat().st_size - 1000)
    return path


def convert_without_a_tensor(folder: Path) -> Path:
    change_tensor(UP, lambda _tensor: None)(folder)
    return convert(folder)


def convert_to_integers(folder: Path) -> Path:
    writer = gguf.GGUFWriter(folder / "whole.gguf", "llama")
    path = convert(folder)
    file = gguf.GGUFReader(path)
    for key in ("context_length", "embedding_length", "feed_forward_length", "block_count", "vocab_size"):
        writer.add_uint32(f"llama.{key}", int(file.fields[f"llama.{key}"].parts[-1][0]))
    for key in ("head_count", "head_count_kv"):
        writer.add_uint32(f"llama.attention.{key}", int(file.fields[f"llama.attention.{key}"].parts[-1][0]))
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    for tensor in file.tensors:
        is_matrix = tensor.name == gguf_name(UP)
        writer.add_tensor(tensor.name, np.ones((96, 64), np.int8) if is_matrix else np.array(tensor.data))
    return finish(writer, folder / "whole.gguf")


def convert_to_an_unknown_type(folder: Path) -> Path:
    path, name = convert(folder), gguf_name(UP).encode()
    content = bytearray(path.read_bytes())
    start = content.index(name) + len(name) + 4 + 2 * 8  # the number of dimensions, and two of them
    content[start : start + 4] = struct.pack("<I", 99)
    path.write_bytes(content)
    return path


def convert_to_version_1(folder: Path) -> Path:
    path = convert(folder)
    content = bytearray(path.read_bytes())
    content[4:8] = struct.pack("<I", 1)
    path.write_bytes(content)
    return path


@dataclass(frozen=True)
class Wrong:
    """A checkpoint that cannot be loaded.

    Attributes:
        found: a pattern of what the message names as the cause.
        way_out: a pattern of what it recommends.
    """

    make: Break
    found: str
    way_out: str


LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": float("inf")}
CASES: dict[str, Wrong] = {
    "no config.json": Wrong(remove("config.json"), r"contains no config\.json", "a model is one of"),
    "config.json is no JSON": Wrong(
        lambda folder: truncate(folder / "config.json", 100),
        r"config\.json: cannot be read as JSON",
        "download it again",
    ),
    "architecture of a known family": Wrong(
        change(architectures=["Olm4ForCausalLM"]),
        r"\['Olm4ForCausalLM'\], which is not supported; nearest supported architectures: ",
        r"docs/models\.md lists all \d+ that are supported",
    ),
    "supported architecture with another head": Wrong(
        change(architectures=["Qwen3ForSequenceClassification"]),
        "which is not supported; nearest supported architectures: Qwen3ForCausalLM, ",
        r"docs/models\.md lists all",
    ),
    "architecture of another family": Wrong(
        change(architectures=["GPT2LMHeadModel"]),
        r"architectures is \['GPT2LMHeadModel'\], which is not supported; docs",
        "models.md lists",
    ),
    "architecture without attention": Wrong(
        change(architectures=["Mamba2ForCausalLM"]),
        r"\['Mamba2ForCausalLM'\], .* because it has no layer with attention, and at least 1 is required",
        "use a hybrid model such as Granite 4 H",
    ),
    "misspelt architecture": Wrong(
        change(architectures=["LlamaForCasualLM"]),
        r"\['LlamaForCasualLM'\], which is not supported, because its name is unknown",
        r"did you mean LlamaForCausalLM\?",
    ),
    "layers of another kind": Wrong(
        change(architectures=["Lfm2ForCausalLM"], norm_eps=1e-5, layer_types=["full_attention", "mamba"]),
        "layer_types contains 'mamba'",
        "supported: conv, full_attention",
    ),
    "undeclared property": Wrong(
        change(attn_sinks=[1, 2]), r"attn_sinks is \[1, 2\]", "remove it from the file if it has no influence"
    ),
    "unsupported activation": Wrong(change(hidden_act="xielu"), "hidden_act is 'xielu'", "supported: silu"),
    "unsupported rotary embedding": Wrong(
        change(rope_parameters={"rope_type": "ntk", "factor": 2.0}), r"rope_type is 'ntk'", "supported: default, linear"
    ),
    "heads that do not fit": Wrong(
        change(num_key_value_heads=3), r"num_attention_heads \(4\)", r"must be a multiple of num_key_value_heads \(3\)"
    ),
    "non-finite scale": Wrong(
        change(rope_parameters=LINEAR), "factor must be a number above 0 and at most .*, got inf", r"at most 1e\+12"
    ),
    "unsupported quantization": Wrong(
        change(quantization_config={"quant_method": "aqlm", "nbits_per_codebook": 16}),
        r"quantization_config\.quant_method is 'aqlm', which is not supported; supported: awq, compressed-tensors",
        "use a GGUF file, or the unquantized model with --quantization int8",
    ),
    "integers in safetensors": Wrong(
        change_tensor(UP, lambda tensor: tensor.to(torch.int32)),
        rf"tensor {UP} has type I32",
        "supported without scales: F64, F32, F16, BF16. Use the unquantized model or a GGUF file",
    ),
    "pickled weights": Wrong(keep_only_pickles, r"contains pytorch_model\.bin", "convert them to safetensors"),
    "missing shard": Wrong(
        refer_to_a_missing_shard, r"model-00002-of-00002\.safetensors: is missing", "download the model again"
    ),
    "truncated safetensors": Wrong(
        lambda folder: truncate(folder / WEIGHTS, 5000), r"model\.safetensors: cannot be read", "download it again"
    ),
    "missing tensor": Wrong(
        change_tensor(UP, lambda _tensor: None),
        rf"tensor {UP} is missing",
        "does not match its configuration: download",
    ),
    "wrong shape": Wrong(
        change(intermediate_size=128),
        r"gate_proj\.weight has the shape \(96, 64\), but the configuration requires \(128, 64\)",
        "use the configuration that belongs to the weights",
    ),
    "additional tensor": Wrong(
        change_tensor("model.layers.0.self_attn.sinks", lambda _tensor: torch.ones(4)),
        r"1 tensors are not declared by the llama architecture \(llama\): model\.layers\.0\.self_attn\.sinks",
        "use a checkpoint without them",
    ),
    "no tokenizer": Wrong(
        remove("tokenizer.json"), r"tokenizer\.json: is missing", "Download it from the page of the model"
    ),
    "fewer rows of the embedding": Wrong(
        change(vocab_size=250),
        r"embed_tokens\.weight has the shape \(256, 64\), but the configuration requires \(250, 64\)",
        "use the configuration that belongs to the weights",
    ),
    "GGUF, architecture of a known family": Wrong(
        convert_to_architecture("gemma3n"),
        r"general\.architecture is 'gemma3n', which is not supported; nearest supported architectures: gemma3, ",
        r"docs/models\.md lists all",
    ),
    "GGUF, unsupported tensor type": Wrong(
        convert_to_integers, r"tensor blk\.1\.ffn_up\.weight has type I8", "use another quantization of the model"
    ),
    "GGUF, unknown tensor type": Wrong(
        convert_to_an_unknown_type,
        r"tensor blk\.1\.ffn_up\.weight has the unknown type 99",
        "upgrade the `gguf` package",
    ),
    "GGUF, truncated": Wrong(convert_and_truncate, r"truncated: tensor .* needs \d+ bytes", "download it again"),
    "GGUF, missing tensor": Wrong(
        convert_without_a_tensor,
        r"tensor blk\.1\.ffn_up\.weight is missing",
        "does not match its configuration: download it again",
    ),
    "GGUF, old version": Wrong(convert_to_version_1, "GGUF version 1 is not supported", "convert the model again"),
}


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, str]]:
    """The message of each case, printed at the end."""
    messages: dict[str, str] = {}
    yield messages
    print("\n\n| checkpoint | message |\n|---|---|")
    for name, message in messages.items():
        print(f"| {name} | {message} |")


@pytest.fixture
def checkpoint(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> Path:
    return add_tokenizer(tiny_model_dir("llama"), tmp_path / "model")


@pytest.mark.parametrize("name", CASES)
def test_the_message_names_the_cause_and_the_way_out(name: str, checkpoint: Path, table: dict[str, str]) -> None:
    wrong = CASES[name]
    path = wrong.make(checkpoint) or checkpoint
    is_gguf = path.suffix == ".gguf"  # The files have no tokenizer, which is the last to be read.
    with pytest.raises(ChairliftError) as caught:
        load_model(EngineConfig(str(path), kernels="torch", num_threads=1, skip_tokenizer_init=is_gguf))
    table[name] = str(caught.value).replace(str(checkpoint.parent), "")
    assert caught.match(wrong.found)
    assert caught.match(wrong.way_out)


def test_checks_have_an_order(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Architecture, quantization, types of tensors, tokenizer, memory: each error hides those that come after it."""
    config, tensors = (shutil.copy(checkpoint / name, checkpoint.parent) for name in ("config.json", WEIGHTS))
    memory = loaded_model.total_memory
    monkeypatch.setattr(loaded_model, "total_memory", lambda _device: 1000)
    (checkpoint / "tokenizer.json").rename(checkpoint.parent / "tokenizer.json")
    change_tensor(UP, lambda tensor: tensor.to(torch.int32))(checkpoint)
    change(architectures=["MambaForCausalLM"], quantization_config={"quant_method": "aqlm"})(checkpoint)
    found = [message_of(checkpoint)]
    change(architectures=["LlamaForCausalLM"])(checkpoint)
    found.append(message_of(checkpoint))
    shutil.copy(config, checkpoint)
    found.append(message_of(checkpoint))
    shutil.copy(tensors, checkpoint)
    found.append(message_of(checkpoint))
    shutil.copy(checkpoint.parent / "tokenizer.json", checkpoint)
    found.append(message_of(checkpoint))
    causes = (
        "architectures is",
        "quantization_config.quant_method",
        "has type I32",
        "tokenizer.json: is missing",
        "the weights",
    )
    assert [cause in message for cause, message in zip(causes, found, strict=True)] == [True] * 5
    monkeypatch.setattr(loaded_model, "total_memory", memory)
    load_model(EngineConfig(str(checkpoint), kernels="torch", num_threads=1))


def message_of(checkpoint: Path) -> str:
    with pytest.raises(ChairliftError) as caught:
        load_model(EngineConfig(str(checkpoint), kernels="torch", num_threads=1))
    return str(caught.value)


def test_the_architecture_comes_before_types_of_tensors_in_gguf_files(checkpoint: Path) -> None:
    path = convert_to_an_unknown_type(checkpoint)
    path.write_bytes(path.read_bytes().replace(b"llama", b"rwkv7"))
    assert "general.architecture is 'rwkv7'" in message_of(path)


@needs_native
def test_weights_larger_than_the_memory_name_a_quantization_that_fits(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_model, "total_memory", lambda _device: 300_000)
    with pytest.raises(
        ChairliftError, match=r"the weights take .* KiB, more than the 293 KiB .*; quantization=q8_0 takes"
    ):
        load_model(EngineConfig(str(checkpoint), kernels="native", num_threads=1))
    monkeypatch.setattr(loaded_model, "total_memory", lambda _device: 1000)
    with pytest.raises(ChairliftError, match="more than the 1000 bytes that this process may use; use a smaller model"):
        load_model(EngineConfig(str(checkpoint), kernels="native", num_threads=1))
