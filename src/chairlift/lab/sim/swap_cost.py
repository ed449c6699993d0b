"""The simulated swap space: its size, and the seconds in which a block is copied from or to it."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.lab.sim.devices import Device
from chairlift.lab.sim.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class SimulatedSwap:
    """A swap space of `num_blocks` blocks. A step that swaps takes `block_seconds` longer for each block."""

    num_blocks: int
    block_seconds: float


def simulate_swap(num_blocks: int, block_size: int, model: ModelShape, device: Device) -> SimulatedSwap | None:
    """The swap space of a simulated engine; None without blocks.

    K and V of each layer are copied by themselves, so a block takes its bytes over the bandwidth to the host, and the
    latency of two copies for each layer.
    """
    if not num_blocks:
        return None
    bandwidth = device.host_bandwidth or device.bandwidth / 2  # a copy within a memory reads and writes it
    seconds = block_size * model.kv_bytes_per_slot / (bandwidth * device.bandwidth_efficiency)
    return SimulatedSwap(num_blocks, seconds + 2 * len(model.config.attention_specs) * device.copy_latency)
