"""Runs ContinuousBatchingPipeline of OpenVINO GenAI with prefix caching: requests are read, one JSON line each, and the
tokens of each step are written."""

from __future__ import annotations

import json
import queue
import sys
import threading
from importlib import import_module
from typing import Any, Final

import numpy as np
from benchmarks.peers.workers.openvino_run import generation_config

openvino: Any = import_module("openvino")
openvino_genai: Any = import_module("openvino_genai")

BLOCK_SIZE: Final = 32
"""The tokens of a block on x86."""


def build(options: dict[str, Any]) -> Any:
    """Create the pipeline. The options are model, seats and num_tokens, the size of the KV memory."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = options["seats"]
    scheduler.num_kv_blocks = options["num_tokens"] // BLOCK_SIZE
    scheduler.cache_size = 0
    scheduler.enable_prefix_caching = True
    return openvino_genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", {})


def read_lines(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)


def run(pipeline: Any, lines: queue.SimpleQueue[str]) -> None:
    """Run the pipeline for ever. It waits for a line if it has no request."""
    handles: dict[str, Any] = {}
    num_added = 0
    while True:
        while not lines.empty() or not handles:
            record = json.loads(lines.get())
            tensor = openvino.Tensor(np.array([record["prompt"]], dtype=np.int64))
            handles[record["id"]] = pipeline.add_request(
                num_added, tensor, generation_config(record["output_len"], None)
            )
            num_added += 1
        pipeline.step()
        for request_id, handle in list(handles.items()):
            token_ids = read_tokens(handle)
            finished = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
            if token_ids or finished:
                print(json.dumps({"id": request_id, "token_ids": token_ids, "finished": finished}), flush=True)
            if finished:
                del handles[request_id]


def read_tokens(handle: Any) -> list[int]:
    """The tokens of a request that have not been read."""
    token_ids: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            token_ids += output.generated_ids
    return token_ids


def main() -> None:
    pipeline = build(json.loads(sys.argv[1]))
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=read_lines, args=(lines,), daemon=True).start()
    print("ready", flush=True)
    run(pipeline, lines)


if __name__ == "__main__":
    main()
