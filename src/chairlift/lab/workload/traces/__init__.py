"""Readers of recorded workloads.

| format | file | one request |
|---|---|---|
| azure | CSV | TIMESTAMP, ContextTokens, GeneratedTokens (Azure public dataset, 2023 and 2024) |
| burstgpt | CSV | Timestamp in seconds, Request tokens, Response tokens (and Model, Total tokens, Log Type) |
| mooncake | JSON lines | timestamp in ms, input_length, output_length, hash_ids: one for each 512 tokens |
| sharegpt | JSON list | {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text}, ...]} |
| custom | JSON lines | {"prompt": text, "output_tokens": n}, as vLLM's benchmarks read it |
| chairlift | JSON lines | as `chairlift serve --record-trace` writes it (see `formats.ChairliftLine`) |

Traces without text have synthetic tokens (`synthetic_tokens`), equal where the trace records equal blocks, different
elsewhere.
"""
