#!/bin/bash
# The end token cannot be a bad word.
#
# Expected: generate(bad_words_ids=[[END]]) never gives the end token, as it never gives any other token of the list.
# Seen (transformers 5.23.0 with torch 2.13.0, 2026-11-30): an entry that consists of an end token alone is removed from the
# list without a warning, and the token keeps its probability. Other entries are obeyed.
#
# Ends with 1 if this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile transformers==5.23.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

END, OTHER = 2, 3
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=1, eos_token_id=END, pad_token_id=0))
options = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
scores = model.generate(torch.tensor([[1, 5, 6]]), bad_words_ids=[[END], [OTHER]], **options).scores[0][0]
print(f"score of the end token: {scores[END]:.3f}, of the other one: {scores[OTHER]}")
assert scores[OTHER] == -torch.inf and scores[END] > -torch.inf, "this has changed"
PYTHON
