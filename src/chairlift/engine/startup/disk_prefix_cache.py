"""Opens the prefix cache on disk for a loaded model, with what its blocks depend on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import torch

from chairlift.config import DEFAULT_DISK_BYTES, EngineConfig
from chairlift.core.kv.kv_groups import FULL
from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.engine.startup.loaded_model import LoadedDecoder
from chairlift.errors import ConfigError
from chairlift.kernels.attention import KVCache
from chairlift.kernels.recurrence import RecurrentState
from chairlift.step_time import StepTime
from chairlift.version import __version__
from chairlift.worker.disk_block_store import HEADER_BYTES, DiskBlockStore

SAMPLES: Final = 64
SAMPLE_BYTES: Final = 1 << 16


def open_block_stores(
    config: EngineConfig, loaded: LoadedDecoder, plan: KVCachePlan, step_time: StepTime | None
) -> list[DiskBlockStore]:
    """Open the stores in `config.prefix_cache_dir`: one for blocks and, if the model has recurrent layers, one for
    checkpoints, each with half of the disk space. Without the option there are none.

    Args:
        step_time: the measured time of steps, by which blocks are computed where reading would take longer.

    Raises:
        ConfigError: the folder cannot be created, or the disk space does not hold a checkpoint.
    """
    if config.prefix_cache_dir is None:
        return []
    kinds: dict[str, list[KVCache | RecurrentState]] = {"blocks": [*kv_caches(loaded)]}
    if plan.state_bytes:
        kinds["checkpoints"] = list(loaded.model.states(plan.num_state_slots - plan.num_checkpoints))
    disk_bytes = config.prefix_cache_disk_bytes or DEFAULT_DISK_BYTES
    max_bytes, required = disk_bytes // len(kinds), plan.state_bytes + HEADER_BYTES
    if plan.state_bytes and max_bytes < required:
        raise ConfigError(
            f"prefix_cache_disk_bytes={disk_bytes} is too small, because half of it is for "
            f"checkpoints of recurrent state, which take {required} bytes each: set it to at least {2 * required}"
        )
    dependencies = fingerprint(config, loaded, plan)
    return [
        DiskBlockStore(
            config.prefix_cache_dir.expanduser(),
            dependencies if what == "blocks" else {**dependencies, "content": what},
            memory,
            plan.block_size,
            max_bytes,
            None if step_time is None else step_time.chunk_seconds,
            what,
        )
        for what, memory in kinds.items()
    ]


def kv_caches(loaded: LoadedDecoder) -> list[KVCache]:
    """The KV memory of the layers, each once: groups of layers share it, and layers may read K and V of others."""
    caches = (layer.kv_cache for layer in loaded.model.attention_layers.values() if layer.kv_source is None)
    return list({id(cache): cache for cache in caches if cache is not None}.values())


def fingerprint(config: EngineConfig, loaded: LoadedDecoder, plan: KVCachePlan) -> dict[str, Any]:
    """What the contents of a block depend on, besides its tokens: the model, its number formats and its kernels."""
    return {
        "chairlift": __version__,
        "torch": f"{torch.__version__} ({torch.backends.cpu.get_cpu_capability()})",
        "model": loaded.name,
        "files": {} if config.load_format == "dummy" else {path.name: _sampled_digest(path) for path in loaded.files},
        "load_format": config.load_format,
        "kernels": loaded.choice.description,
        "dtype": loaded.choice.dtype,
        "kv_cache_dtype": loaded.choice.kv_cache_dtype,
        "quantization": loaded.choice.quantization,
        "block_size": plan.block_size,
        "block_bytes": plan.block_bytes,
        "max_model_len": config.max_model_len,
        **({} if plan.windows == FULL else {"windows": plan.windows}),
    }


def _sampled_digest(path: Path) -> str:
    """The digest of the size and of parts of a file. Reading all of a large file would delay the start."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(number * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
