"""Fixtures shared by all tests: the default model, and tiny random models written by transformers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import os
from collections.abc import Callable, Generator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import HealthCheck, settings
from safetensors.torch import load_file, save_file

from chairlift.engine.startup import decoder_engine
from chairlift.kernels.kernel_set import KERNEL_SETS
from support.tiny_models import make_tiny_config, randomize
from support.waiting import AMPLE_SECONDS

KERNEL_SETS["reference"] = "support.reference_kernels:ReferenceKernelSet"
torch.set_num_threads(1)
# An engine measures the time of its steps until two rounds agree, which takes seconds on a busy machine.
decoder_engine.fastest_round = lambda measure: measure()
# How long an example takes depends on what else the machine does.
settings.register_profile("chairlift", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("chairlift")
# So does how long a server takes: calls without a timeout would have httpx's default of 5 seconds.
vars(inspect.signature(httpx.Client).parameters["timeout"].default).update(httpx.Timeout(AMPLE_SECONDS).as_dict())
# Each client would read all certificates of the machine, which takes 35 ms.
httpx._transports.default.create_ssl_context = cache(httpx.create_ssl_context)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude imported modules and collected tests from garbage collection, which would visit them in every test, and
    let it start after more allocations."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 10, 10)
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(
        pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters})
    )
    return True


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the page tests, which need a browser, to `make test-pages`."""
    is_chosen = any("pages" in argument for argument in config.args)
    return True if collection_path.name == "pages" and not is_chosen else None


def _write_tiny_model(arch: str, folder: Path, overrides: dict[str, Any], max_shard_size: str) -> None:
    model_class, config = make_tiny_config(arch, **overrides)
    model = model_class(config).to(torch.float32).eval()
    randomize(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if overrides.get("mtp_num_hidden_layers"):
        _add_predictor(folder / "model.safetensors")


def _add_predictor(path: Path) -> None:
    """Add a predictor to the weights of Qwen3.5. Model and predictor follow the embedding of their last token, so its
    tokens are often those of the model."""
    tensors, generator = load_file(path), torch.Generator().manual_seed(1)

    def noise(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator) * scale

    tensors["model.embed_tokens.weight"] *= 200
    for name in [name for name in tensors if name.startswith("model.layers.3.")]:
        scale = 0.02 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.2
        tensors[name.replace("model.layers.3.", "mtp.layers.0.")] = noise(tensors[name], scale)
    norm = tensors["model.norm.weight"]
    first = noise(norm, 0.2)
    both = torch.cat((torch.diag(1 / (1 + first)), noise(torch.empty(64, 64), 0.02)), dim=1)
    tensors |= {"mtp.norm.weight": norm + noise(norm, 0.1), "mtp.pre_fc_norm_hidden.weight": noise(norm, 0.2)}
    tensors |= {"mtp.pre_fc_norm_embedding.weight": first, "mtp.fc.weight": both}
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model_dir(arch, max_shard_size="1GB", **config overrides)` -> a folder that transformers wrote.

    `arch` is a key of TINY_MODELS: fp32, hidden 64, 2 layers or more, 4 heads (2 of K and V but for OPT), vocabulary
    256, random with a fixed seed. The same arguments give the same folder: treat it as read-only. OPT, Gemma 2, Gemma 3
    and "gemma4" tie their embeddings. With mtp_num_hidden_layers=1 the folder has a predictor as well.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # The processes of the tests use what one of them has written.

    def make(arch: str, *, max_shard_size: str = "1GB", **overrides: Any) -> Path:
        key = json.dumps([arch, max_shard_size, overrides], sort_keys=True)
        folder = shared / f"tiny_{arch}_{sha256(key.encode()).hexdigest()[:16]}"
        if not folder.exists():
            written = tmp_path_factory.mktemp("written")
            _write_tiny_model(arch, written, overrides, max_shard_size)
            with contextlib.suppress(OSError):  # Another process was faster.
                written.rename(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model, SmolLM2-135M-Instruct, fetched into the model cache once."""
    from chairlift.loading.fetch import fetch_model

    return fetch_model()
