#!/bin/bash
# An adapter of tied embeddings is added twice when it is merged.
#
# Expected: with ensure_weight_tying=True, an adapter of embed_tokens holds for lm_head too, which has the same matrix, and
# merge_and_unload() adds its product, alpha / r * B A, to this matrix.
# Seen (peft 0.21.2 with transformers 5.23.0 and torch 2.13.0, 2026-11-30): each of the two layers adds the product to the
# common matrix, so that the merged model differs from the adapted one. A warning says that merging may have complications.
#
# Ends with 1 if this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile peft==0.21.2 transformers==5.23.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
for name, is_tied, expected in (("q_proj", False, 1), ("embed_tokens", True, 2)):
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    options = {"init_lora_weights": False, "ensure_weight_tying": is_tied}
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=[name], **options))
    layer = next(module for key, module in adapted.named_modules() if key.endswith(name))
    product = layer.get_delta_weight("default").detach()
    merged = adapted.merge_and_unload().state_dict()
    change = next(merged[key] - weights[key] for key in weights if key.endswith(name + ".weight"))
    times = (change.norm() / product.norm()).item()
    print(f"{name}: merging adds the product of the adapter {times:.3f} times")
    assert abs(times - expected) < 0.001, "this has changed"
PYTHON
