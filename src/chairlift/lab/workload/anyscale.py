"""The workload of Anyscale's benchmark of continuous batching, drawn exactly as its published scripts draw it.

Source: "How continuous batching enables 23x throughput in LLM inference while reducing p50 latency" (Daniel et al.,
Anyscale, 2023), scripts in anyscale/llm-continuous-batching-benchmarks on GitHub.

The throughput workload is a burst of 1000 prompts of 512 tokens. Output lengths are exponential with mean 128, rounded,
and drawn again above a cap; end-of-sequence tokens are ignored. The longest request, 512 + 1536 tokens, fits the 2048
positions of the model.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Final

import numpy as np

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest

SEED: Final = 0xCADE
NUM_REQUESTS: Final = 1000
PROMPT_LEN: Final = 512
MEAN_OUTPUT_LEN: Final = 128
CAPS: Final = (32, 128, 512, 1536)
"""The maximum output lengths of the four published workloads."""

STATIC_BATCH_SIZES: Final = {32: 16, 128: 12, 512: 8, 1536: 4}
"""By cap: the largest static batch that cannot run out of memory on an A100 with 40 GB."""

TOKEN_BUDGETS: Final = {32: 8700, 128: 7500, 512: 8100, 1536: 8100}
"""By cap: the maximum number of tokens in a step of the continuous systems."""


def throughput_workload(cap: int, count: int = NUM_REQUESTS) -> list[WorkloadRequest]:
    """Returns the requests of the throughput benchmark. All arrive at once, and each has 512 prompt tokens.

    Args:
        cap: the maximum output length; one of CAPS for a published workload.
        count: 1000 for the published workload. Another count gives different requests, not a part of it.

    Raises:
        ConfigError: cap or count is less than 1.
    """
    prompts, state = _prompts(count, PROMPT_LEN, PROMPT_LEN)
    return _requests(prompts, _output_lens(state, cap, count), [0.0] * count)


@dataclass(frozen=True, slots=True)
class AnyscaleLengths:
    """A `LengthDistribution` that returns the output lengths of the throughput figure in their published order.

    Attributes:
        cap: the maximum output length, one of CAPS.
        divisor: divides each length, rounded up, for machines and models that are smaller.
    """

    syntax: ClassVar[str] = "anyscale:CAP[/DIVISOR]"
    cap: int
    divisor: int = 1

    def __post_init__(self) -> None:
        for name, value in (("CAP", self.cap), ("DIVISOR", self.divisor)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        if count > NUM_REQUESTS:
            raise ConfigError(f"{self}: count must be at most {NUM_REQUESTS}, the published number, got {count}")
        return [-(-length // self.divisor) for length in _published_output_lens(self.cap)[:count]]

    def __str__(self) -> str:
        return f"anyscale:{self.cap}" + (f"/{self.divisor}" if self.divisor > 1 else "")


@cache
def _published_output_lens(cap: int) -> tuple[int, ...]:
    return tuple(item.output_len for item in throughput_workload(cap))


def latency_workload(request_rate: float, count: int = 100) -> list[WorkloadRequest]:
    """Returns the requests of the latency figures: Poisson arrivals, and outputs of at most 1536 tokens.

    Prompts have 1 to 512 tokens as in the text of the source; its scripts have 128 to 384.

    Args:
        request_rate: requests per second; the figures have 1 and 4.
        count: 100 for the published workload.

    Raises:
        ConfigError: request_rate is not positive, or count is less than 1.
    """
    if not 0 < request_rate < float("inf"):
        raise ConfigError(f"request_rate must be a positive number, got {request_rate}")
    prompts, state = _prompts(count, 1, PROMPT_LEN)
    output_lens = _output_lens(state, max(CAPS), count)
    gaps = [0.0, *(state.exponential(1 / request_rate) for _ in range(count - 1))]
    return _requests(prompts, output_lens, np.cumsum(gaps).tolist())


def _prompts(count: int, low: int, high: int) -> tuple[list[list[int]], np.random.RandomState]:
    """Returns the prompts, and the generator for the output lengths, which is seeded by the draw after them.

    As in the published scripts, all lengths are drawn before the first token, even if `low` equals `high`.
    """
    if count < 1:
        raise ConfigError(f"Anyscale workload: count must be at least 1, got {count}")
    source = random.Random(SEED)
    lens = [source.randint(low, high) for _ in range(count)]
    prompts = [[source.randint(10, 50000) for _ in range(length)] for length in lens]
    return prompts, np.random.RandomState(source.randint(0, 1_000_000))


def _output_lens(state: np.random.RandomState, cap: int, count: int) -> list[int]:
    """Draws each length again until it is at most `cap`; a length of 0 becomes 1, as in the published scripts."""
    if cap < 1:
        raise ConfigError(f"Anyscale workload: cap must be at least 1, got {cap}")
    lens: list[int] = []
    while len(lens) < count:
        length = round(state.exponential(MEAN_OUTPUT_LEN))
        if length <= cap:
            lens.append(max(1, length))
    return lens


def _requests(prompts: list[list[int]], output_lens: list[int], times: list[float]) -> list[WorkloadRequest]:
    columns = zip(times, prompts, output_lens, strict=True)
    return [WorkloadRequest(f"anyscale-{i}", *column) for i, column in enumerate(columns)]
