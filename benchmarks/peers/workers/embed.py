"""Computes the vectors of texts with sentence-transformers or OpenVINO, and prints the seconds of each round as JSON.

    python embed.py sentence-transformers|openvino MODEL-FOLDER TEXTS.json THREADS

It prints a line when it is ready, runs a round for each line on standard input, and prints the seconds, and with the
first round the vectors of the first texts. Both engines sort the texts by length and pad batches of 32.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

BATCH = 32

Vectors = Callable[[list[str]], Any]


def sentence_transformers(folder: str, threads: int) -> Vectors:
    import_module("torch").set_num_threads(threads)
    model = import_module("sentence_transformers").SentenceTransformer(folder, device="cpu")
    return lambda texts: model.encode(texts, batch_size=BATCH, show_progress_bar=False)


def openvino(folder: str, threads: int) -> Vectors:
    numpy, torch, transformers, ov = map(import_module, ("numpy", "torch", "transformers", "openvino"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.ones((2, 8), dtype=torch.long)
    example = {"input_ids": ids, "attention_mask": ids, "token_type_ids": torch.zeros_like(ids)}
    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = ov.Core().compile_model(ov.convert_model(model, example_input=example), "CPU", options)

    def run(texts: list[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        found = [None] * len(texts)
        for start in range(0, len(order), BATCH):
            part = order[start : start + BATCH]
            inputs = tokenizer([texts[index] for index in part], padding=True, return_tensors="np")
            rows = compiled({name: inputs[name] for name in example})[0][:, 0]
            rows = rows / numpy.linalg.norm(rows, axis=1, keepdims=True)
            for index, row in zip(part, rows, strict=True):
                found[index] = row
        return numpy.array(found)

    return run


def main() -> None:
    name, folder, file, threads = sys.argv[1:]
    with open(file, encoding="utf-8") as opened:
        texts = json.load(opened)
    vectors = {"sentence-transformers": sentence_transformers, "openvino": openvino}[name](folder, int(threads))
    vectors(texts[:BATCH])
    print("ready", flush=True)
    for _line in sys.stdin:
        started = time.perf_counter()
        found = vectors(texts)
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "first": [list(map(float, row)) for row in found[:4]]}), flush=True)


if __name__ == "__main__":
    main()
