"""Fuzz targets for files of users and callers: LoRA adapters, API keys, options, and the prefix cache on disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fuzz_models import HF_CONFIG
from fuzz_targets import JSON, Target, altered, damaged, deep
from hypothesis import strategies as st
from safetensors.torch import save

from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError
from chairlift.kernels.attention import KVCache
from chairlift.loading.lora_adapter import read_lora_adapter
from chairlift.models.registry import read_hf_config
from chairlift.option_sources import read_options
from chairlift.server.access.keys import key_record, load_keys, to_toml
from chairlift.worker.disk_block_store import DiskBlockStore

CONFIG = {**HF_CONFIG, "num_hidden_layers": 1}
RANK, HIDDEN = 4, 64
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def settings_targets(folder: Path) -> list[Target]:
    """Return all targets for these files, which use `folder` for them."""
    return [
        _adapter_config_target(folder),
        _adapter_tensors_target(folder),
        _key_target(folder),
        _option_target(folder),
        _cache_target(folder),
    ]


def _target(name: str, cases: st.SearchStrategy[Any], read: Callable[[Any], object], num_short: int = 100) -> Target:
    def check(case: Any) -> None:
        try:
            read(case)
        except ChairliftError:
            target.add("rejected")
        else:
            target.add("read")

    target = Target(name, cases, check, num_short)
    return target


def _adapter_tensors() -> bytes:
    return save({f"{PREFIX}A.weight": torch.ones(RANK, HIDDEN), f"{PREFIX}B.weight": torch.ones(HIDDEN, RANK)})


def _adapter_config_target(folder: Path) -> Target:
    adapter = folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(_adapter_tensors())
    config = read_hf_config(CONFIG, source="f")
    whole = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "rank_pattern": {"q_proj": RANK},
        "alpha_pattern": {r"layers\.\d+\.q_proj": 4},
        "use_rslora": False,
        "bias": "none",
    }
    odd = JSON | st.dictionaries(st.sampled_from(["(a+)+$", "(", ".*.*.*.*x", "[", "q_proj", r"\1", "a{99999}"]), JSON)
    cases = altered([whole], odd).map(lambda value: json.dumps(value).encode())

    def read(data: bytes) -> None:
        (adapter / "adapter_config.json").write_bytes(data)
        read_lora_adapter(str(adapter), config, 8)

    return _target("adapter_config.json", cases | st.sampled_from([*deep(), b"", b"\xff", b"NaN"]), read)


def _adapter_tensors_target(folder: Path) -> Target:
    adapter = folder / "adapter_tensors"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 8}))
    config = read_hf_config(CONFIG, source="f")
    whole = _adapter_tensors()
    (length,) = struct.unpack_from("<Q", whole)
    head = json.loads(whole[8 : 8 + length])
    shapes = st.sampled_from([(4, 64), (1 << 40, 64)]).map(list)
    values = JSON | shapes | st.sampled_from(["F64", "I64", "F8_E4M3", "F4", "C64", "BF16", "F16"])
    headers = altered([head], values).map(lambda header: json.dumps(header).encode())
    files = headers.map(lambda header: struct.pack("<Q", len(header)) + header + whole[8 + length :])

    def read(data: bytes) -> None:
        path = adapter / "adapter_model.safetensors"
        path.unlink(missing_ok=True)  # the old one may be mapped still
        path.write_bytes(data)
        read_lora_adapter(str(adapter), config, 8)

    return _target("adapter tensors", damaged([whole], 8 + length) | files, read)


def _key_target(folder: Path) -> Target:
    records = [key_record("s" * 20, name="a", admin=True), key_record("t" * 20, name="b", weight=2.0)]
    toml, lines = folder / "keys.toml", folder / "keys.jsonl"
    text = "\n".join(to_toml(record) for record in records).encode()
    as_lines = altered([records[0]]).map(lambda record: (lines, json.dumps(record).encode()))

    def read(case: tuple[Path, bytes]) -> None:
        path, data = case
        path.write_bytes(data)
        load_keys(path)

    return _target("key files", as_lines | damaged([text]).map(lambda data: (toml, data)), read)


def _option_target(folder: Path) -> Target:
    path = folder / "options.yaml"
    whole = (
        b"max-num-seqs: 8\nkv: paged\nspeculative-config: {method: ngram, num_speculative_tokens: 3}\ndtype: float32\n"
    )
    values = st.dictionaries(st.sampled_from(["max-num-seqs", "kv", "seed", "lora-modules", "x"]), JSON, max_size=3)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_options(EngineConfig, path, environment=False)

    return _target("option files", damaged([whole]) | values.map(lambda value: json.dumps(value).encode()), read, 8)


def _cache_target(folder: Path) -> Target:
    def cache(seed: int) -> KVCache:
        draw = torch.Generator().manual_seed(seed)
        return KVCache(*(torch.randn(4, 2, 4, 8, generator=draw) for _ in range(2)))

    def open_store(kv_cache: KVCache) -> DiskBlockStore:
        return DiskBlockStore(folder / "cache", {"model": "m"}, [kv_cache], 4, 1 << 20)

    block_hash, kv_cache = b"h" * 32, cache(0)
    store = open_store(kv_cache)
    store.save([block_hash], [1])
    store.close()
    (file,) = folder.glob("cache/*/*.kv")
    whole = file.read_bytes()

    def check(data: bytes) -> None:
        file.write_bytes(data)
        other = cache(1)
        store = open_store(other)
        is_loaded = store.load([block_hash], [2], 0) == 1
        store.close()
        assert is_loaded == (data == whole)
        assert not is_loaded or torch.equal(other[0][2], kv_cache[0][1])
        target.add("read" if is_loaded else "rejected")

    target = Target("prefix cache on disk", damaged([whole]), check, 60)
    return target
