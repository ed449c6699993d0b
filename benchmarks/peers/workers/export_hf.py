"""Converts a GGUF file to a folder with float32 safetensors, configuration and tokenizer."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

transformers: Any = import_module("transformers")


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    names: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32)
    model.hf_quantizer = None  # The weights are dequantized, but transformers 5.24 does not save what was quantized.
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(**names).save_pretrained(target)


if __name__ == "__main__":
    main()
