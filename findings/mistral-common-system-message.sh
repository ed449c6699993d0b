#!/bin/bash
# The system message of Mistral's v3 format moves to the last message of the user in each turn.
#
# Expected: the prompt of a turn begins with the prompt of the turn before, so that a prefix cache finds it.
# Seen (mistral-common 1.13.1, 2026-11-30): the v2 and v3 formats write the system message, and the tools, in the last
# message of the user, so that the prompts share the first token and little more. In v1 and v7 it is at the beginning.
#
# Ends with 1 if this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mistral-common==1.13.1 sentencepiece==0.2.3
"$folder/venv/bin/python" - <<'PYTHON'
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}]
NEXT = [{"role": "assistant", "content": "Two."}, {"role": "user", "content": "Three?"}]
for version, moves in (("v1", False), ("v2", True), ("v3", True), ("v7", False)):
    tokenizer = getattr(MistralTokenizer, version)()
    prompts = [
        tokenizer.encode_chat_completion(ChatCompletionRequest.from_openai(messages=messages))
        for messages in (TURNS, TURNS + NEXT)
    ]
    first, second = (prompt.tokens for prompt in prompts)
    print(f"{version}: {prompts[1].text}")
    assert (second[: len(first)] != first) == moves, "this has changed"
PYTHON
