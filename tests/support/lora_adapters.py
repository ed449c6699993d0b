"""LoRA adapters with random weights that the PEFT library writes, and the models that they are merged into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from support.tiny_models import load_reference

SIZE = 0.3
"""The standard deviation of the weights, so that adapters change most tokens."""

VARIANTS: list[dict[str, Any]] = [
    {"target_modules": "all-linear", "r": 8, "lora_alpha": 16},
    {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 12},
    {"target_modules": "all-linear", "r": 5, "lora_alpha": 3, "use_rslora": True},
    {
        "target_modules": "all-linear",
        "r": 2,
        "lora_alpha": 4,
        "rank_pattern": {"down_proj": 7, "layers.1.self_attn.q_proj": 3},
        "alpha_pattern": {"o_proj": 9},
    },
    {"target_modules": ["gate_proj", "k_proj"], "r": 1, "lora_alpha": 1},
    {"target_modules": ["down_proj", "o_proj"], "r": 16, "lora_alpha": 8},
    {"target_modules": ["q_proj", "down_proj"], "r": 3, "lora_alpha": 6, "layers_to_transform": [1]},
    {"target_modules": ["up_proj", "q_proj"], "r": 12, "lora_alpha": 24},
]
"""Configurations with different modules, ranks and scales."""


def write_adapter(model: Path, folder: Path, seed: int = 0, **config: Any) -> Path:
    """Write an adapter of the model in `model`, as PEFT saves it."""
    base = load_reference(model)
    adapted = get_peft_model(base, LoraConfig(**config))
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = SIZE * torch.randn(parameter.shape, generator=draw)
    adapted.save_pretrained(str(folder))
    return folder


def merged_model(model: Path, adapter: Path | None) -> Any:
    """The model of transformers with the adapter merged into its weights."""
    base = load_reference(model, attn_implementation="eager")
    return base if adapter is None else PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
