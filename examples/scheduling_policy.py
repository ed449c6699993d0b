"""Compare a scheduling policy of your own with first come, first served, in the simulator.

A policy whose order is fixed at arrival is a function from a request to its priority: `--scheduling-policy priority`
runs the smallest priority first. The scheduler is that of the engine; only the time of a step comes from a cost model,
so the comparison needs no model and takes about a second.

    python examples/scheduling_policy.py
"""

from collections.abc import Callable
from dataclasses import replace

from chairlift.lab import (
    DEVICES,
    ArrivalProcess,
    KVPool,
    Roofline,
    RunMetrics,
    RunTally,
    SchedulerConfig,
    SimConfig,
    WorkloadRequest,
    make_workload,
    model_shape,
    parse_lengths,
    simulate,
)

POLICIES: dict[str, Callable[[WorkloadRequest], int]] = {
    "first come, first served": lambda request: 0,
    "shortest output first": lambda request: request.max_output_len,
    "shortest prompt first": lambda request: len(request.prompt_token_ids),
}


def run(priority: Callable[[WorkloadRequest], int]) -> RunMetrics:
    """Simulate 200 Poisson arrivals on OPT-13B and an A100, ordered by `priority`."""
    requests = make_workload(
        seed=0,
        count=200,
        prompt=parse_lengths("lognormal:96,0.7,16..512"),
        output=parse_lengths("exp:96,8..384"),
        arrivals=ArrivalProcess(8.0, 1.0),
        vocab_size=1000,
    )
    shape = model_shape("opt-13b")
    limits = SchedulerConfig(max_model_len=2048, max_num_seqs=16, scheduling_policy="priority")
    tally = RunTally()
    simulate(
        [replace(request, priority=priority(request)) for request in requests],
        SimConfig(limits, KVPool(num_blocks=1000, block_size=16, max_model_len=2048), model=shape),
        Roofline(shape, DEVICES["A100-40GB"]),
        tally,
    )
    return tally.result()


def main() -> None:
    """Print latencies under each policy."""
    for name, priority in POLICIES.items():
        metrics = run(priority)
        assert metrics.ttft is not None
        assert metrics.e2e_latency is not None
        print(
            f"{name:26} TTFT p50 {metrics.ttft.p50:5.2f} s, p99 {metrics.ttft.p99:5.2f} s; "
            f"E2E latency p50 {metrics.e2e_latency.p50:5.2f} s, p99 {metrics.e2e_latency.p99:5.2f} s"
        )


if __name__ == "__main__":
    main()
