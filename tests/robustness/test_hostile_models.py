"""Hostile model files are rejected with an error, without delay and within little memory."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tools.fuzz_models import ARRAY, BOOL, F32, SHAPE, STRING, U32, gguf_bytes, gguf_metadata, packed_string
from tools.fuzz_targets import deep, guarded

from chairlift.errors import ModelLoadError
from chairlift.loading.gguf_file import GGUFFile
from chairlift.loading.model_source import FolderSource
from chairlift.loading.safetensors_weights import INDEX, _weight_map
from chairlift.loading.text.gguf_tokenizer import GGUFVocabulary, build_tokenizer
from chairlift.loading.text.hf_tokenizer import folder_tokenizer
from support.tiny_tokenizer import write_tokenizer

HUGE = (1 << 64) - 1
TENSOR = ("token_embd.weight", SHAPE, 0, 0)
DATA = bytes(16 << 10)


def head(num_tensors: int, num_keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys)


KEY = packed_string("key")
TWICE = KEY + struct.pack("<II", U32, 1)
ENTRY = packed_string("t") + struct.pack("<I4Q", 4, *[HUGE] * 4)
FLOATS = KEY + struct.pack("<IIQ", ARRAY, F32, 1 << 24) + bytes(4 << 24)

HOSTILE_GGUFS: dict[str, tuple[bytes, str]] = {
    "keys without end": (head(0, HUGE) + TWICE, "truncated"),
    "tensors without end": (head(HUGE, 0) + bytes(64), "dimensions|truncated"),
    "a string longer than the file": (head(0, 1) + struct.pack("<Q", HUGE), "truncated"),
    "an array longer than the file": (head(0, 1) + KEY + struct.pack("<IIQ", ARRAY, STRING, 1 << 22), "truncated"),
    "an array that memory cannot hold": (head(0, 1) + FLOATS, "16777216 entries; the limit is 8388608"),
    "arrays in arrays": (head(0, 1) + KEY + struct.pack("<IIQ", ARRAY, ARRAY, 1 << 40), "is an array of arrays"),
    "a shape whose product overflows": (head(1, 0) + ENTRY + struct.pack("<IQ", 0, 0), "truncated"),
    "an offset that wraps around": (gguf_bytes({}, [("t", (1,), 0, HUGE)], DATA), "truncated"),
    "tensors that overlap": (gguf_bytes({}, [TENSOR, ("u", (8,), 0, 4096)], DATA), "token_embd.weight and u overlap"),
    "a tensor twice": (gguf_bytes({}, [TENSOR, TENSOR], DATA), "tensor token_embd.weight occurs twice"),
    "a key twice": (head(0, 2) + TWICE * 2, "key key occurs twice"),
    "no alignment": (gguf_bytes({"general.alignment": (U32, 0)}, [], b""), "general.alignment must be"),
    "an alignment beyond the file": (gguf_bytes({"general.alignment": (U32, (1 << 32) - 1)}, [TENSOR], DATA), "trunc"),
}


@pytest.mark.parametrize("name", HOSTILE_GGUFS)
def test_hostile_gguf_files(tmp_path: Path, name: str) -> None:
    data, problem = HOSTILE_GGUFS[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with guarded(), pytest.raises(ModelLoadError, match=problem):
        _ = GGUFFile(path).tensors


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"tokenizer.ggml.tokens": (ARRAY, (STRING, ["x" * 1_000_000, *"abcdefgh"]))}, "too long to derive"),
        ({"tokenizer.ggml.tokens": (ARRAY, (STRING, ["a"] * 9))}, "contains 'a' twice|lacks '<unk>'"),
        ({"tokenizer.ggml.tokens": (ARRAY, (U32, [1] * 9))}, "wrong type"),
        ({"tokenizer.ggml.scores": (ARRAY, (F32, [0.0] * 8))}, "8 entries, but there are 9 tokens"),
        ({"tokenizer.ggml.model": (STRING, "gpt2"), "tokenizer.ggml.merges": (ARRAY, (STRING, ["q z"]))}, "merges"),
        ({"tokenizer.ggml.model": (BOOL, True)}, "model is True"),
    ],
)
def test_hostile_gguf_vocabularies(tmp_path: Path, changed: dict[str, Any], problem: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({**gguf_metadata(), **changed}, [], b""))
    with guarded(), pytest.raises(ModelLoadError, match=problem):
        build_tokenizer(GGUFVocabulary(GGUFFile(path)))


@pytest.mark.parametrize("text", [*deep(), b"[]", b"\xff", b"NaN", b""])
def test_hostile_json_files(tmp_path: Path, text: bytes) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_bytes(text)
    (tmp_path / INDEX).write_bytes(text)
    with guarded(), pytest.raises(ModelLoadError, match=r"config\.json: "):
        FolderSource(tmp_path, "m").config()
    with guarded(), pytest.raises(ModelLoadError, match="weight_map"):
        _weight_map(tmp_path)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"):
        (tmp_path / name).write_bytes(text)
        with guarded(), pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
            folder_tokenizer(tmp_path)
        (tmp_path / name).unlink()
        write_tokenizer(tmp_path)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", 7, "weights.bin"])
def test_index_cannot_refer_outside_its_folder(tmp_path: Path, file: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(ModelLoadError, match="files in the same folder"):
        _weight_map(tmp_path)
