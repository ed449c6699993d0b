"""Fuzz targets for model files: loading any file gives a model or a ModelLoadError."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from hypothesis import strategies as st
from safetensors.torch import save_file

from chairlift.errors import ModelLoadError
from chairlift.loading.gguf_file import GGUFFile
from chairlift.loading.gguf_weights import GGUFWeights
from chairlift.loading.model_source import FolderSource
from chairlift.loading.text.gguf_tokenizer import GGUFVocabulary, build_tokenizer
from chairlift.loading.text.hf_tokenizer import folder_tokenizer
from chairlift.models.registry import read_gguf_config, read_hf_config
from support.tiny_tokenizer import write_tokenizer
from tools.fuzz_targets import INTERESTING, JSON, Target, altered, damaged, deep

CPU = torch.device("cpu")
SHAPE = (64, 32)
HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": [2, 3],
    "bos_token_id": 1,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "dtype": "float32",
}
OPT_CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": [2, 3],
    "bos_token_id": 1,
    "ffn_dim": 96,
    "activation_function": "relu",
    "word_embed_proj_dim": 64,
}
QWEN_CONFIG = {
    **HF_CONFIG,
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
ENDING = ModelLoadError


def model_targets(folder: Path) -> list[Target]:
    """Return all targets for model files, which use `folder` for their files."""
    return [
        _gguf_target(folder),
        _gguf_metadata_target(folder),
        _safetensors_target(folder),
        _config_target(folder),
        _tokenizer_target(folder),
        _settings_target(folder),
    ]


def _target(name: str, cases: st.SearchStrategy[Any], load: Callable[[Any], object], num_short: int) -> Target:
    def check(case: Any) -> None:
        try:
            load(case)
        except ModelLoadError:
            target.add("rejected")
        else:
            target.add("loaded")

    target = Target(name, cases, check, num_short)
    return target


# -- GGUF ----------------------------------------------------------------------------------------------------------

Value = tuple[int, Any]
STRING, ARRAY, U32, F32, BOOL = 8, 9, 4, 6, 7


def packed_string(text: str) -> bytes:
    data = text.encode(errors="surrogatepass")
    return struct.pack("<Q", len(data)) + data


def packed_value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return packed_string(value)
    if kind == ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(packed_value(inner, item) for item in items)
    return struct.pack({U32: "<I", F32: "<f", BOOL: "<?"}[kind], value)


def gguf_bytes(metadata: dict[str, Value], tensors: list[tuple[str, tuple[int, ...], int, int]], data: bytes) -> bytes:
    """Return a file in the format of the specification, with any contents."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [
        packed_string(key) + struct.pack("<I", kind) + packed_value(kind, v) for key, (kind, v) in metadata.items()
    ]
    for name, shape, kind, offset in tensors:
        parts += [packed_string(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)]
    head = b"".join(parts)
    return head + b"\0" * (-len(head) % 32) + data


def gguf_metadata(model: str = "llama") -> dict[str, Value]:
    counts = {
        "context_length": 256,
        "embedding_length": 32,
        "feed_forward_length": 96,
        "block_count": 1,
        "attention.head_count": 4,
    }
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁ab", "<0x0A>"]
    return {
        "general.architecture": (STRING, "llama"),
        "general.alignment": (U32, 32),
        **{f"llama.{key}": (U32, value) for key, value in counts.items()},
        "llama.attention.head_count": (U32, 4),
        "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
        "llama.rope.freq_base": (F32, 10000.0),
        "tokenizer.ggml.model": (STRING, model),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.scores": (ARRAY, (F32, [float(-i) for i in range(len(tokens))])),
        "tokenizer.ggml.token_type": (ARRAY, (U32, [2, 3, 3, 1, 1, 1, 1, 4, 6])),
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b"])),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.eos_token_id": (U32, 2),
        "tokenizer.ggml.add_bos_token": (BOOL, True),
        "tokenizer.chat_template": (STRING, "{{ messages[0].content }}"),
    }


def _whole_ggufs() -> list[bytes]:
    num_values = SHAPE[0] * SHAPE[1]
    kinds = [(GGMLQuantizationType.F32, 4 * num_values), (GGMLQuantizationType.Q4_1, num_values // 32 * 20)]
    files = []
    for model, (kind, size) in zip(("llama", "gpt2"), kinds, strict=True):
        tensors = [("token_embd.weight", SHAPE, int(kind), 0), ("output_norm.weight", (32,), 0, size)]
        files.append(gguf_bytes(gguf_metadata(model), tensors, bytes(size + 4 * 32)))
    return files


def _load_gguf(path: Path) -> None:
    file = GGUFFile(path)
    ends = sorted((tensor.offset, tensor.offset + tensor.num_bytes) for tensor in file.tensors.values())
    assert all(end <= path.stat().st_size for _, end in ends)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends)), "tensors overlap"
    config = read_gguf_config(file.metadata, source="f", tensor_names=file.tensors.keys())
    weights = GGUFWeights(file, config, torch.float32, CPU)
    assert weights.tensor("model.embed_tokens.weight", SHAPE).shape == SHAPE
    weights.unused()
    assert isinstance(build_tokenizer(GGUFVocabulary(file)).encode("ab a\n").ids, list)


def _gguf_target(folder: Path) -> Target:
    path = folder / "fuzzed.gguf"

    def load(data: bytes) -> None:
        path.unlink(missing_ok=True)  # the old one may be mapped still
        path.write_bytes(data)
        _load_gguf(path)

    wholes = _whole_ggufs()
    header = wholes[0].index(bytes(256))
    return _target("GGUF, damaged", damaged(wholes, header) | st.binary(max_size=200), load, 100)


_ODD_TEXTS = ["$A", "$B:1", ":", " ", "", "a b", "▁", "{{", "{% for %}", "a" * 3000]
_texts = st.text(max_size=12) | st.sampled_from(_ODD_TEXTS)
_u32s = st.sampled_from(INTERESTING).map(lambda number: number % (1 << 32))
_scalars = _u32s.map(lambda number: (U32, number)) | st.floats(width=32).map(lambda number: (F32, number))
_values = (
    _scalars
    | st.booleans().map(lambda flag: (BOOL, flag))
    | _texts.map(lambda text: (STRING, text))
    | st.lists(_texts, max_size=9).map(lambda items: (ARRAY, (STRING, items)))
    | st.lists(_u32s, max_size=9).map(lambda items: (ARRAY, (U32, items)))
    | st.lists(st.floats(width=32), min_size=9, max_size=9).map(lambda items: (ARRAY, (F32, items)))
)


def _gguf_metadata_target(folder: Path) -> Target:
    path = folder / "metadata.gguf"
    keys = [*gguf_metadata(), "llama.attention.head_count_kv", "tokenizer.ggml.pre", "llama.rope.scaling.type"]
    changes = st.dictionaries(st.sampled_from(keys), _values, max_size=3)
    odd = st.sampled_from([0, 4, 32, 4096, 8192, 1 << 40, (1 << 64) - 1])
    offsets = st.just((0, 8192)) | st.just((8192, 0)) | st.tuples(odd, odd)

    def load(case: tuple[str, dict[str, Value], tuple[int, int]]) -> None:
        model, changed, (first, second) = case
        tensors = [("token_embd.weight", SHAPE, 0, first), ("output_norm.weight", (32,), 0, second)]
        path.unlink(missing_ok=True)
        path.write_bytes(gguf_bytes({**gguf_metadata(model), **changed}, tensors, bytes(16 << 10)))
        _load_gguf(path)

    return _target(
        "GGUF, odd values",
        st.tuples(st.sampled_from(["llama", "gpt2"]), changes, offsets),
        load,
        120,
    )


# -- safetensors ---------------------------------------------------------------------------------------------------


def _safetensors_target(folder: Path) -> Target:
    model = folder / "safetensors"
    model.mkdir(exist_ok=True)
    config = read_hf_config(HF_CONFIG, source="f")
    tensors = {"model.embed_tokens.weight": torch.ones(SHAPE), "model.norm.weight": torch.ones(32)}
    save_file(tensors, model / "whole.safetensors")
    whole = (model / "whole.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", whole)
    head = json.loads(whole[8 : 8 + length])
    dtypes = st.sampled_from(["F64", "I64", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "C64", "x", "F16", "U16"])
    offsets = st.lists(st.sampled_from([0, 1, 8191, 8192, 8320, 1 << 62, (1 << 64) - 1, -1]), min_size=2, max_size=2)
    shapes = st.lists(st.sampled_from([0, 1, 32, 64, 1 << 32, 1 << 63]), max_size=3)
    headers = altered([head], JSON | dtypes | offsets | shapes).map(lambda h: json.dumps(h).encode())
    files = headers.map(lambda h: struct.pack("<Q", len(h)) + h + whole[8 + length :])

    def load(data: bytes) -> None:
        path = model / "model.safetensors"
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        weights = FolderSource(model, "m").weights(config, torch.float32, CPU)
        weights.packed("model.embed_tokens.weight", SHAPE)
        assert weights.tensor("model.embed_tokens.weight", SHAPE).shape == SHAPE
        weights.unused()

    deeps = st.sampled_from([struct.pack("<Q", len(text)) + text for text in deep()])
    return _target("safetensors", damaged([whole], 8 + length) | files | st.binary(max_size=99) | deeps, load, 80)


# -- JSON ----------------------------------------------------------------------------------------------------------


def _as_json(values: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    whole = values.map(lambda value: json.dumps(value).encode())
    return whole | st.sampled_from([*deep(), b"", b"\xff", b"[]", b"NaN"])


def _config_target(folder: Path) -> Target:
    model = folder / "config"
    model.mkdir(exist_ok=True)
    configs = _as_json(altered([HF_CONFIG, OPT_CONFIG, QWEN_CONFIG]) | JSON)
    generations = _as_json(altered([{"eos_token_id": [1, 2]}]))

    def load(case: tuple[bytes, bytes]) -> None:
        (model / "config.json").write_bytes(case[0])
        (model / "generation_config.json").write_bytes(case[1])
        FolderSource(model, "m").config()

    return _target("config.json", st.tuples(configs, st.just(b"{}") | generations), load, 100)


def _tokenizer_target(folder: Path) -> Target:
    model = write_tokenizer(folder / "tokenizer")
    whole = json.loads((model / "tokenizer.json").read_bytes())
    cases = _as_json(altered([whole])) | damaged([(model / "tokenizer.json").read_bytes()])

    def load(data: bytes) -> None:
        (model / "tokenizer.json").write_bytes(data)
        tokenizer = folder_tokenizer(model)
        assert all(isinstance(tokenizer.token_bytes(i), bytes) for i in tokenizer.encode("ab an <s>"))

    return _target("tokenizer.json", cases, load, 60)


def _settings_target(folder: Path) -> Target:
    model = write_tokenizer(folder / "settings")
    settings = {
        "bos_token": "a",
        "eos_token": {"content": "b"},
        "add_bos_token": True,
        "chat_template": [{"name": "default", "template": "{{ messages }}"}, {"name": "x", "template": "y"}],
    }

    def load(case: tuple[bytes, bytes]) -> None:
        (model / "tokenizer_config.json").write_bytes(case[0])
        (model / "special_tokens_map.json").write_bytes(case[1])
        tokenizer = folder_tokenizer(model)
        assert tokenizer.encode("ab")

    cases = _as_json(altered([settings]) | JSON)
    return _target("tokenizer_config.json", st.tuples(cases, st.just(b"{}") | cases), load, 80)
