"""A GGUF file as a folder with float32 safetensors, configuration and tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    names = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32)
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(**names).save_pretrained(target)


if __name__ == "__main__":
    main()
