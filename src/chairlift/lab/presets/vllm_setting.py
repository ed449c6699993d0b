"""The setting of the vLLM paper's experiments with OPT-13B (Kwon et al., SOSP'23, sections 6.1 and 6.2).

Lengths are drawn independently from the two histograms of Figure 11: which prompt belonged to which output was not
published. Nothing here was chosen after seeing a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from chairlift.config import SchedulerConfig
from chairlift.lab.sim.devices import DEVICES
from chairlift.lab.sim.published_models import model_shape
from chairlift.lab.sim.roofline import Roofline
from chairlift.lab.sim.simulator import SimConfig
from chairlift.lab.workload.arrivals import PoissonArrivals
from chairlift.lab.workload.lengths import HistogramLengths, paired_lengths
from chairlift.lab.workload.request import WorkloadRequest

MODEL: Final = "opt-13b"
DEVICE: Final = "A100-40GB"
NUM_SLOTS: Final = 15_728
"""12 GiB of K and V at 800 KiB a token (Table 1 says 15.7K)."""
BLOCK_SIZE: Final = 16
MAX_MODEL_LEN: Final = 2048
MAX_NUM_SEQS: Final = 256
MAX_NUM_BATCHED_TOKENS: Final = 2560
"""Seats and token budget are the defaults of the first vLLM release."""

DATASETS: Final = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}
RATES: Final = {"sharegpt": 2.0, "alpaca": 30.0}
"""Requests a second in Figure 13."""

POLICIES: Final = {"max": "Orca (Max)", "pow2": "Orca (Pow2)", "oracle": "Orca (Oracle)", "paged": "vLLM"}
"""`--kv` -> the paper's name."""


def cost_model(model: str = MODEL) -> Roofline:
    return Roofline(model_shape(model), DEVICES[DEVICE])


def sim_config(
    kv: str,
    *,
    block_size: int = BLOCK_SIZE,
    static_batch_size: int | None = None,
    enable_prefix_caching: bool = False,
    model: str = MODEL,
) -> SimConfig:
    """The engine: NUM_SLOTS in whole blocks, reservations from a buddy arena.

    Args:
        static_batch_size: of static batches; None: continuous batching.
        enable_prefix_caching: the paper shares only what it says it shares, so it is off elsewhere.
    """
    limits = SchedulerConfig(MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
    if static_batch_size is not None:
        limits = replace(limits, batching="static", static_batch_size=static_batch_size)
    return SimConfig(
        limits,
        num_blocks=NUM_SLOTS // block_size,
        block_size=block_size,
        kv=kv,
        enable_prefix_caching=enable_prefix_caching,
        model=model_shape(model),
    )


def constants(model: str = MODEL) -> list[tuple[str, str]]:
    """What all presets of the paper print first."""
    return [
        (
            "KV pool",
            f"{NUM_SLOTS:,} slots = {NUM_SLOTS // BLOCK_SIZE} blocks of {BLOCK_SIZE}; reservations: buddy arena",
        ),
        ("max_model_len", f"{MAX_MODEL_LEN}"),
        ("max_num_seqs", f"{MAX_NUM_SEQS}"),
        ("max_num_batched_tokens", f"{MAX_NUM_BATCHED_TOKENS}"),
        ("lengths", f"histograms of Figure 11, independent, pairs above {MAX_MODEL_LEN} drawn again"),
        *cost_model(model).constants(),
    ]


class Load:
    """Requests of one data set, which can be had at any rate: lengths and relative gaps stay the same, so that two
    rates, or two policies, differ in nothing else."""

    def __init__(self, pairs: Sequence[tuple[int, int]], seed: int) -> None:
        self.pairs = pairs
        self._times = PoissonArrivals(1.0).times(np.random.default_rng([seed, 1]), len(pairs))

    @classmethod
    def draw(cls, dataset: str, seed: int, count: int) -> Load:
        """`count` requests of a data set (see DATASETS)."""
        prompt, output = HistogramLengths.load(f"{dataset}-input"), HistogramLengths.load(f"{dataset}-output")
        return cls(paired_lengths(prompt, output, MAX_MODEL_LEN, np.random.default_rng([seed, 0]), count), seed)

    def saturated(self) -> list[WorkloadRequest]:
        """All of them, at once."""
        return self._requests([0.0] * len(self.pairs))

    def at_rate(self, rate: float, count: int | None = None) -> list[WorkloadRequest]:
        """The first `count` of them (None: all), in Poisson arrivals at `rate` requests a second."""
        return self._requests([time / rate for time in self._times[:count]])

    def _requests(self, times: Sequence[float]) -> list[WorkloadRequest]:
        """Without a prefix cache nobody looks at the tokens of a prompt."""
        return [
            WorkloadRequest(f"r{index}", time, bytes(prompt_len), output_len)
            for index, (time, (prompt_len, output_len)) in enumerate(zip(times, self.pairs, strict=False))
        ]
