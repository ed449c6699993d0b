"""Creates models with random weights, for the speed of sizes that no package contains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from chairlift.loading.random_weights import RandomWeights
from chairlift.loading.resolve import load_config, load_tokenizer, resolve_model

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
    }
}
"""The config.json of each model, a Llama in bfloat16, by its name in `--model`."""

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
    """All tensors of the Llama that the config.json in `folder` describes, without an LM head.

    The weights are those of `--load-format dummy`: ones for norms, and N(0, 0.02^2) for the others.
    """
    config = load_config(resolve_model(str(folder)))
    weights = RandomWeights(config, getattr(torch, config.dtype), torch.device("cpu"))
    given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {name: weights.tensor(name, shape) for name, shape in llama_shapes(given).items()}


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a Llama with tied embeddings by their names."""
    hidden, feed_forward = config["hidden_size"], config["intermediate_size"]
    query, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (feed_forward, hidden),
        "mlp.up_proj": (feed_forward, hidden),
        "mlp.down_proj": (hidden, feed_forward),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _write_tokenizer(target: Path) -> None:
    tokenizer = load_tokenizer(resolve_model(None))
    tokenizer.backend.save(str(target / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    (target / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
