#!/bin/bash
# A constant of 19 digits in a JSON schema allows another number.
#
# Expected: the schema {"const": 1234567890123456789} permits the text 1234567890123456789 and no other, as with jsonschema.
# Seen (llguidance 1.9.1, 2026-11-30): the number is read as a double. The text of the constant is refused, and
# 1234567890123456768, the closest double, is accepted, without an error or a warning.
#
# Ends with 1 if this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet llguidance==1.9.1 jsonschema==4.26.0
"$folder/venv/bin/python" - <<'PYTHON'
import json

import jsonschema
from llguidance import LLMatcher, LLTokenizer


class Bytes:
    """A tokenizer with one token for each byte."""

    is_tokenizer_wrapper, bos_token_id, eos_token_id, special_token_ids = True, None, 256, [256]
    tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>"]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


schema = {"const": 1234567890123456789}
matcher = LLMatcher(LLTokenizer(Bytes(), 257, [256], []), LLMatcher.grammar_from_json_schema(json.dumps(schema)))
assert not matcher.is_error() and not matcher.get_grammar_warnings()
for text in ("1234567890123456789", "1234567890123456768"):
    tokens = [*text.encode(), 256]
    is_accepted = matcher.validate_tokens(tokens) == len(tokens)
    is_valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    print(f"{text}: llguidance {'accepts' if is_accepted else 'refuses'} it, jsonschema {'accepts' if is_valid else 'refuses'} it")
    assert is_accepted != is_valid, "this has changed"
PYTHON
