"""Creates models with random weights, for the speed of sizes that no package contains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from chairlift.loading.resolve import load_config, load_tokenizer, resolve_model
from chairlift.models.declaration import ModelConfig
from chairlift.models.random_weights import RandomWeights

RANDOM_MODELS: Final[dict[str, dict[str, Any]]] = {
    "random-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
    },
    # The layers of Qwen3-30B-A3B, https://huggingface.co/Qwen/Qwen3-30B-A3B, with 6 of 48 and a smaller vocabulary.
    "random-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 49152,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "initializer_range": 0.02,
    },
}
"""The config.json of each model, in bfloat16, by its name in `--model`."""

DONE: Final = "generation_config.json"
"""The file that is written last."""


def random_model(name: str, folder: Path) -> Path:
    """The folder of a model of RANDOM_MODELS below `folder`. It is created once, and always has the same weights.

    It has the tokenizer of the default model, whose vocabulary has the same size.
    """
    target = folder / name
    if not (target / DONE).exists():
        target.mkdir(parents=True, exist_ok=True)
        config = RANDOM_MODELS[name]
        (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        save_file(random_tensors(target), target / "model.safetensors", metadata={"format": "pt"})
        _write_tokenizer(target)
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
        (target / DONE).write_text(json.dumps(ids), encoding="utf-8")
    return target


def random_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the model that the config.json in `folder` describes.

    The weights are those of `--load-format dummy`: ones for norms, and N(0, 0.02^2) for the others.
    """
    config = load_config(resolve_model(str(folder)))
    weights = RandomWeights(config, getattr(torch, config.dtype), torch.device("cpu"))
    return {name: weights.tensor(name, shape) for name, shape in declared_shapes(config)}


def declared_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of each tensor of a model without biases, whose norms are RMSNorm."""
    for matrix in config.matrices:
        for name, (_, out_features) in zip(matrix.weight_names, matrix.parts, strict=True):
            yield name, (out_features, matrix.in_features)
    for layer in config.layers:
        yield from ((f"{norm.name}.weight", (norm.size,)) for norm in layer.norms)
        if (attention := layer.attention) is not None and (head_norm := attention.head_norm) is not None:
            names = (f"{head_norm.query}.weight", f"{head_norm.key}.weight")
            yield from zip(names, ((size,) for size in attention.head_norm_sizes), strict=True)
    if config.final_norm is not None:
        yield f"{config.final_norm.name}.weight", (config.final_norm.size,)


def _write_tokenizer(target: Path) -> None:
    tokenizer = load_tokenizer(resolve_model(None))
    tokenizer.backend.save(str(target / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    (target / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
