#!/bin/bash
# The client adds up numbers and truth values of a streamed message.
#
# Expected: chat.completions.stream joins texts, and of other fields keeps the last value.
# Seen (openai 3.52.0, 2026-11-30): numbers are added, true twice gives 2, and texts that a server repeats in each chunk are
# joined: the role becomes "assistantassistant", the id of a call "call_1call_1", its name "ff". Only "index" and "type"
# are kept.
#
# Ends with 1 if this changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openai==3.52.0 httpx==0.28.1
"$folder/venv/bin/python" - <<'PYTHON'
import json

import httpx
import openai

CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
DELTAS = [{"role": "assistant", "content": "a", "tokens": 5, "cached": True, "tool_calls": [CALL]}] * 2
CHUNKS = [
    {"index": 0, "delta": delta, "finish_reason": None} for delta in DELTAS
] + [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]


def answer(request):
    head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    body = "".join(f"data: {json.dumps({**head, 'choices': [choice]})}\n\n" for choice in CHUNKS)
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=body + "data: [DONE]\n\n")


client = openai.OpenAI(api_key="key", base_url="http://server", http_client=httpx.Client(transport=httpx.MockTransport(answer)))
with client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "Hello"}]) as stream:
    message = stream.get_final_completion().choices[0].message.model_dump()
call = message["tool_calls"][0]
seen = (message["role"], message["tokens"], message["cached"], call["id"], call["function"]["name"])
print("role, tokens, cached, id and name:", seen)
assert seen == ("assistantassistant", 10, 2, "call_1call_1", "ff"), "this has changed"
PYTHON
