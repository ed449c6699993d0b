"""Runs ContinuousBatchingPipeline of OpenVINO GenAI on this thread."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from benchmarks.peers.records import (
    EngineRun,
    PeerRequest,
    RequestTiming,
    RequestTimings,
    clock,
    peak_rss_bytes,
    run_job,
    worker_arguments,
)

openvino: Any = import_module("openvino")
openvino_genai: Any = import_module("openvino_genai")

MAX_NGRAM_SIZE = 3
"""The number of last tokens that prompt lookup searches for; the default of OpenVINO's example."""


def build(options: dict[str, Any]) -> Any:
    """Create the pipeline.

    The options are model (a folder with an IR, or a .gguf file), seats, token_budget, cache_gb, num_threads,
    has_prefix_cache and prompt_lookup (a number of draft tokens, or None).
    """
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = options["seats"]
    scheduler.max_num_batched_tokens = options["token_budget"]
    scheduler.cache_size = options["cache_gb"]
    scheduler.enable_prefix_caching = options["has_prefix_cache"]
    properties = {} if options["num_threads"] is None else {"INFERENCE_NUM_THREADS": options["num_threads"]}
    if options["prompt_lookup"] is not None:
        properties["prompt_lookup"] = True
    return openvino_genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", properties)


def generation_config(output_len: int, prompt_lookup: int | None) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = output_len
    config.ignore_eos = True
    config.do_sample = False
    if prompt_lookup is not None:
        config.num_assistant_tokens = prompt_lookup
        config.max_ngram_size = MAX_NGRAM_SIZE
    return config


@dataclass(slots=True)
class Driver:
    """Sends requests to the pipeline, and records the time of each token."""

    pipeline: Any
    prompt_lookup: int | None = None
    num_sent: int = 0

    def drive(self, requests: list[PeerRequest]) -> RequestTimings:
        timings: RequestTimings = {}
        handles: dict[str, Any] = {}
        start = clock()
        for request in requests:
            tensor = openvino.Tensor(np.array([request.prompt_token_ids], dtype=np.int64))
            handles[request.request_id] = self.pipeline.add_request(
                self.num_sent, tensor, generation_config(request.output_len, self.prompt_lookup)
            )
            timings[request.request_id] = RequestTiming(start)
            self.num_sent += 1
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            now = clock()
            for request_id, handle in handles.items():
                timings[request_id].token_times += [now] * count_new_tokens(handle)
        return timings


def count_new_tokens(handle: Any) -> int:
    """The number of tokens that the last step generated for a request."""
    if not handle.can_read():
        return 0
    return sum(len(output.generated_ids) for output in handle.read().values())


def main() -> None:
    job, out = worker_arguments()
    driver = Driver(build(job.options), job.options["prompt_lookup"])
    timings = run_job(job, driver.drive)
    version = openvino_genai.__version__
    EngineRun(*timings, peak_rss_bytes(), {"openvino_genai": version}).write(out)


if __name__ == "__main__":
    main()
