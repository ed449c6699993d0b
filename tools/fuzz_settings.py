"""Fuzz targets for files of users and callers: LoRA adapters, API keys, options, and the prefix cache on disk."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save

from chairlift import LLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError
from chairlift.kernels.attention import KVCache
from chairlift.option_sources import read_options
from chairlift.options import Selection, declared_options
from chairlift.server.access.access_options import AccessOptions, ServerLimits
from chairlift.server.access.keys import key_record, load_keys, to_toml
from chairlift.server.models.model_options import ModelOptions
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.serve_options import ObservabilityOptions
from chairlift.worker.disk_block_store import DiskBlockStore
from tools.fuzz_models import HF_CONFIG
from tools.fuzz_targets import JSON, Target, altered, damaged, deep

CONFIG = {**HF_CONFIG, "num_hidden_layers": 1}
RANK, HIDDEN = 4, 64
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


class AdapterEngine:
    """An engine with random weights, which loads adapters and computes the same tokens before and after."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _llm(self) -> LLM:
        model = self._folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "num_threads": 1}
        return LLM(model=str(model), num_kv_blocks=8, max_loras=1, max_lora_rank=2 * RANK, **options)

    @cached_property
    def expected(self) -> list[int]:
        """The tokens of the model without an adapter."""
        return self._tokens()

    def _tokens(self, adapter: str | None = None) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        (output,) = self._llm.generate([[3, 4, 5]], params, use_tqdm=False, lora_request=adapter)
        return output.outputs[0].token_ids

    def load(self, adapter: Path) -> None:
        """Load an adapter and use it. The engine goes on, also if the adapter is rejected."""
        try:
            self._llm.load_lora_adapter("a", str(adapter))
            self._tokens("a")
            self._llm.unload_lora_adapter("a")
        finally:
            assert self._tokens() == self.expected


def settings_targets(folder: Path) -> list[Target]:
    """Return all targets for these files, which use `folder` for them."""
    engine = AdapterEngine(folder)
    return [
        _adapter_config_target(folder, engine),
        _adapter_tensors_target(folder, engine),
        _key_target(folder),
        _option_target(folder),
        _cache_target(folder),
    ]


def _target(name: str, cases: st.SearchStrategy[Any], read: Callable[[Any], object], **about: Any) -> Target:
    def check(case: Any) -> None:
        try:
            read(case)
        except ChairliftError:
            target.add("rejected")
        else:
            target.add("read")

    target = Target(name, cases, check, **about)
    return target


def _adapter_tensors() -> bytes:
    return save({f"{PREFIX}A.weight": torch.ones(RANK, HIDDEN), f"{PREFIX}B.weight": torch.ones(HIDDEN, RANK)})


def _adapter_config_target(folder: Path, engine: AdapterEngine) -> Target:
    adapter = folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(_adapter_tensors())
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
        engine.load(adapter)

    return _target(
        "adapter_config.json",
        cases | st.sampled_from([*deep(), b"", b"\xff", b"NaN"]),
        read,
        prepare=lambda: engine.expected,
    )


def _adapter_tensors_target(folder: Path, engine: AdapterEngine) -> Target:
    adapter = folder / "adapter_tensors"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 8}))
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
        engine.load(adapter)

    return _target("adapter tensors", damaged([whole], 8 + length) | files, read, prepare=lambda: engine.expected)


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


OPTION_RECORDS = (
    EngineConfig,
    ServerLimits,
    AccessOptions,
    ApiOptions,
    ObservabilityOptions,
    ModelOptions,
)
OPTIONS_A_CASE = 4
"""The time to read a file grows with the number of options of the record, so that a case has a few of them."""

OPTION_TEXTS = "-1 0 0x10 1_000 1e400 nan inf 8MiB auto none null ~nosuchuser/x /dev/zero . .. a=b a=b,a=c [1] {} *.c"


def _option_parts() -> list[tuple[type[Any], list[str]]]:
    """The records of options with a few names of their options each."""
    parts = []
    for record in OPTION_RECORDS:
        names = list(declared_options(record))
        parts += [(record, names[first : first + OPTIONS_A_CASE]) for first in range(0, len(names), OPTIONS_A_CASE)]
    return parts


@st.composite
def _option_files(draw: st.DrawFn) -> tuple[type[Any], list[str], bytes]:
    """Draw options of a record, and a file with odd values of them, which may be damaged."""
    record, names = draw(st.sampled_from(_option_parts()))
    values = JSON | st.sampled_from([*OPTION_TEXTS.split(), "a\0b", "\U0001f600", "x" * 5000])
    content = draw(st.dictionaries(st.sampled_from([*names, "x"]), values, max_size=3))
    whole = json.dumps({name.replace("_", "-"): value for name, value in content.items()}).encode()
    return record, names, draw(st.just(whole) | damaged([whole]))


def _option_target(folder: Path) -> Target:
    path = folder / "options.yaml"

    def read(case: tuple[type[Any], list[str], bytes]) -> None:
        record, names, data = case
        path.write_bytes(data)
        with contextlib.chdir(folder):  # names of files of logs
            read_options(Annotated[record, Selection(only=names)], path, environment=False)  # type: ignore[arg-type]

    return _target("option files", _option_files(), read)


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
