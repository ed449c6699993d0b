"""Runs vLLM's engine in this process."""

from __future__ import annotations

from importlib import import_module
from typing import Any

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

vllm: Any = import_module("vllm")


def build(options: dict[str, Any]) -> Any:
    """Create the engine. The options are model (a folder), dtype, seats, token_budget, max_model_len and
    has_prefix_cache, and perhaps load_format."""
    arguments = vllm.EngineArgs(
        model=options["model"],
        dtype=options["dtype"],
        load_format=options.get("load_format", "auto"),
        max_num_seqs=options["seats"],
        max_num_batched_tokens=options["token_budget"],
        max_model_len=options["max_model_len"],
        enable_prefix_caching=options["has_prefix_cache"],
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    return vllm.LLMEngine.from_engine_args(arguments)


def make_driver(engine: Any) -> Any:
    def drive(requests: list[PeerRequest]) -> RequestTimings:
        timings: RequestTimings = {}
        start = clock()
        for request in requests:
            params = vllm.SamplingParams(
                temperature=0, max_tokens=request.output_len, ignore_eos=True, detokenize=False
            )
            engine.add_request(request.request_id, {"prompt_token_ids": request.prompt_token_ids}, params)
            timings[request.request_id] = RequestTiming(start)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = clock()
            for output in outputs:
                times = timings[output.request_id].token_times
                times += [now] * (len(output.outputs[0].token_ids) - len(times))
        return timings

    return drive


def main() -> None:
    job, out = worker_arguments()
    timings = run_job(job, make_driver(build(job.options)))
    EngineRun(*timings, peak_rss_bytes(with_children=True), {"vllm": vllm.__version__}).write(out)


if __name__ == "__main__":
    main()
