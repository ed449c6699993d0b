"""What GGUF files call the parameters of a model."""

from __future__ import annotations

from typing import Final

import gguf

from chairlift.models.config import ModelConfig

MODEL_ARCHS: Final = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def tensor_names(config: ModelConfig) -> gguf.TensorNameMap:
    """Hugging Face's names to GGUF's."""
    return gguf.get_tensor_name_map(MODEL_ARCHS[config.name], config.num_layers)
