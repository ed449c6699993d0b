"""Runs transformers: `generate` on static batches, or its ContinuousBatchingManager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from benchmarks.peers.records import (
    Drive,
    EngineRun,
    PeerRequest,
    RequestTiming,
    RequestTimings,
    clock,
    peak_rss_bytes,
    run_job,
    worker_arguments,
)

transformers: Any = import_module("transformers")


def load_model(options: dict[str, Any]) -> Any:
    """Load the model. The options are model (a folder with safetensors), dtype and num_threads."""
    if options["num_threads"] is not None:
        torch.set_num_threads(options["num_threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=getattr(torch, options["dtype"]))
    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=None)
    return model.eval()


class TokenClock:
    """Records the time at which `generate` streams each token of one sequence. The first call has the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(clock())

    def end(self) -> None:
        pass


@contextmanager
def static_driver(model: Any, options: dict[str, Any]) -> Iterator[Drive]:
    """Run batches of options["seats"] requests in order of arrival, padded on the left, each to its longest output."""

    @torch.inference_mode()
    def drive(requests: list[PeerRequest]) -> RequestTimings:
        start, size = clock(), options["seats"]
        timings: RequestTimings = {}
        for first in range(0, len(requests), size):
            timings |= generate_batch(model, requests[first : first + size], start)
        return timings

    yield drive


def generate_batch(model: Any, batch: Sequence[PeerRequest], sent: float) -> RequestTimings:
    width = max(len(request.prompt_token_ids) for request in batch)
    longest = max(request.output_len for request in batch)
    ids = torch.zeros((len(batch), width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        ids[row, width - len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
        mask[row, width - len(request.prompt_token_ids) :] = 1
    streamer = TokenClock() if len(batch) == 1 else None
    out = model.generate(ids, attention_mask=mask, max_new_tokens=longest, streamer=streamer)
    now, num_new = clock(), out.shape[1] - width
    if streamer is not None:
        return {batch[0].request_id: RequestTiming(sent, streamer.times[1:])}
    return {r.request_id: RequestTiming(sent, [now] * min(r.output_len, num_new), is_streamed=False) for r in batch}


@contextmanager
def continuous_driver(model: Any, options: dict[str, Any]) -> Iterator[Drive]:
    """Run one manager, which generates on its own thread. The calling thread reads the tokens."""
    config = transformers.ContinuousBatchingConfig(
        max_requests_per_batch=options["seats"],
        max_batch_tokens=options["token_budget"],
        num_blocks=options["num_blocks"],
        page_size=options["page_size"],
        allow_block_sharing=False,
    )
    manager = model.init_continuous_batching(continuous_batching_config=config)
    manager.start()

    def drive(requests: list[PeerRequest]) -> RequestTimings:
        start = clock()
        timings = {request.request_id: RequestTiming(start) for request in requests}
        for r in requests:
            manager.add_request(r.prompt_token_ids, r.request_id, r.output_len, streaming=True, eos_token_id=-1)
        num_open = len(requests)
        while num_open:
            output = manager.get_result(timeout=600)
            if output is None or output.error is not None:
                raise SystemExit(f"transformers failed: {'no result' if output is None else output.error}")
            times = timings[output.request_id].token_times
            times += [clock()] * (len(output.generated_tokens) - len(times))
            num_open -= output.is_finished()
        return timings

    try:
        yield drive
    finally:
        manager.stop(hard_stop=True)


def main() -> None:
    job, out = worker_arguments()
    model = load_model(job.options)
    driver = {"static": static_driver, "continuous": continuous_driver}[job.options["batching"]]
    with driver(model, job.options) as drive:
        timings = run_job(job, drive)
    engine = {"transformers": transformers.__version__, "torch": torch.__version__}
    EngineRun(*timings, peak_rss_bytes(), engine).write(out)


if __name__ == "__main__":
    main()
