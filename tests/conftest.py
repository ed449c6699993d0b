"""Fixtures shared by all tests: the default model, and tiny random models written by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    import transformers

torch.set_num_threads(1)

TINY_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TINY_GATED: dict[str, Any] = {"intermediate_size": 96, "num_key_value_heads": 2, "tie_word_embeddings": False}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", TINY_GATED),
    "llama3": ("Llama", {**TINY_GATED, "rope_parameters": LLAMA3_ROPE}),
    "mistral": ("Mistral", {**TINY_GATED, "sliding_window": 24}),
    "qwen2": ("Qwen2", TINY_GATED),
    "qwen3": ("Qwen3", {**TINY_GATED, "head_dim": 16}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0}),
}


def _randomize(model: torch.nn.Module) -> None:
    """Give every parameter, biases and norms included, values that a mix-up would show."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise + 1.0 if "norm.weight" in name else noise)


def _write_tiny_model(arch: str, folder: Path, overrides: dict[str, Any], max_shard_size: str) -> None:
    import transformers

    family, extra = TINY_MODELS[arch]
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = model_class(config_class(**{**TINY_COMMON, **extra, **overrides})).to(torch.float32).eval()
    _randomize(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model_dir(arch, max_shard_size="1GB", **config overrides)` -> a folder that transformers wrote.

    `arch` is a key of TINY_MODELS: fp32, hidden 64, 2 layers, 4 heads (2 of K and V but for OPT), vocabulary 256,
    random with a fixed seed. The same arguments give the same folder: treat it as read-only. OPT ties its embeddings.
    """
    made: dict[str, Path] = {}

    def make(arch: str, *, max_shard_size: str = "1GB", **overrides: Any) -> Path:
        key = json.dumps([arch, max_shard_size, overrides], sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"tiny_{arch}")
            _write_tiny_model(arch, folder, overrides, max_shard_size)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model, SmolLM2-135M-Instruct, fetched into the model cache once."""
    from chairlift.loading.fetch import fetch_model

    return fetch_model()


@pytest.fixture(scope="session")
def smollm2_oracle(smollm2_gguf: Path) -> transformers.PreTrainedModel:
    """The default model as transformers itself reads the file, in float32."""
    import gguf
    import transformers

    with pytest.MonkeyPatch.context() as patch:
        for slow_and_pure in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, slow_and_pure, lru_cache(getattr(gguf, slow_and_pure)))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
        )
    return model.eval()
