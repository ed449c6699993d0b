#!/bin/bash
# A limit below the number of special tokens turns truncation off.
#
# Expected: enable_truncation(max_length=1), with two special tokens around each text, is an error, or gives at most one token.
# Seen (tokenizers 0.23.3, 2026-11-30): a limit of 2 leaves the two special tokens, but with 1 or 0 the whole text comes
# back, of any length, without an error or a warning.
#
# Ends with 1 if this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
from tokenizers import Tokenizer, models, pre_tokenizers, processors

tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "word": 2}))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
for limit, expected in ((4, 4), (3, 3), (2, 2), (1, 102), (0, 102)):
    tokenizer.enable_truncation(max_length=limit)
    tokens = len(tokenizer.encode("word " * 100).ids)
    print(f"max_length={limit}: {tokens} tokens")
    assert tokens == expected, "this has changed"
PYTHON
