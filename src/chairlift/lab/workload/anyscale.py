"""The workload of Anyscale's benchmark of continuous batching, drawn exactly as its published scripts draw it.

Source: "How continuous batching enables 23x throughput in LLM inference while reducing p50 latency" (Daniel et al.,
Anyscale, 2023), scripts in anyscale/llm-continuous-batching-benchmarks on GitHub.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Final

import numpy as np

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest

SEED: Final = 0xCADE
NUM_REQUESTS: Final = 1000
PROMPT_LEN: Final = 512
MEAN_OUTPUT_LEN: Final = 128


def anyscale_workload(
    cap: int, count: int = NUM_REQUESTS, *, request_rate: float | None = None
) -> list[WorkloadRequest]:
    """Draw the requests of the throughput figure, or of the latency figure if there is a rate.

    Throughput: all requests arrive at once, and each has 512 prompt tokens. Latency: Poisson arrivals, and prompts of 1
    to 512 tokens as in the text of the source; its scripts have 128 to 384. Output lengths are exponential with mean
    128, rounded, and drawn again above the cap; a length of 0 becomes 1.

    Args:
        cap: the maximum output length; 32, 128, 512 or 1536 (latency: 1536) for a published workload.
        count: 1000 (latency: 100) for the published workload. Another count gives different requests, not a part of it.
        request_rate: requests per second.

    Raises:
        ConfigError: cap or count is less than 1, or request_rate is not positive.
    """
    if cap < 1 or count < 1 or (request_rate is not None and not 0 < request_rate < float("inf")):
        raise ConfigError(
            "Anyscale workload: cap and count must be at least 1, and request_rate a positive number, got "
            f"cap={cap}, count={count}, request_rate={request_rate}"
        )
    source = random.Random(SEED)
    shortest = PROMPT_LEN if request_rate is None else 1
    # As in the scripts, all lengths are drawn before the first token, even if they are equal.
    prompt_lens = [source.randint(shortest, PROMPT_LEN) for _ in range(count)]
    prompts = [[source.randint(10, 50000) for _ in range(length)] for length in prompt_lens]
    state = np.random.RandomState(source.randint(0, 1_000_000))
    output_lens: list[int] = []
    while len(output_lens) < count:
        length = round(state.exponential(MEAN_OUTPUT_LEN))
        if length <= cap:
            output_lens.append(max(1, length))
    times = [0.0] * count
    if request_rate is not None:
        times[1:] = np.cumsum([state.exponential(1 / request_rate) for _ in range(count - 1)]).tolist()
    columns = zip(times, prompts, output_lens, strict=True)
    return [WorkloadRequest(f"anyscale-{i}", *column) for i, column in enumerate(columns)]


@cache
def published_output_lens(cap: int, count: int) -> tuple[int, ...]:
    """The first output lengths of the throughput figure.

    Raises:
        ConfigError: `count` exceeds NUM_REQUESTS.
    """
    if count > NUM_REQUESTS:
        raise ConfigError(f"anyscale:{cap}: count must be at most {NUM_REQUESTS}, the published number, got {count}")
    return tuple(item.output_len for item in anyscale_workload(cap)[:count])
