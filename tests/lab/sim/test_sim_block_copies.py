from __future__ import annotations

import pytest
from sim_workloads import ConstantCost

from chairlift.clock import VirtualClock
from chairlift.lab.sim.devices import DEVICES
from chairlift.lab.sim.executor import SimExecutor
from chairlift.lab.sim.model_shape import model_shape
from chairlift.lab.sim.roofline import block_copy_seconds
from chairlift.outputs import SchedulerOutput


def test_a_block_takes_its_bytes_over_the_bandwidth_and_a_latency_for_each_copy() -> None:
    seconds = block_copy_seconds(16, model_shape("opt-13b"), DEVICES["A100-40GB"])
    assert seconds == pytest.approx(16 * 819_200 / (32e9 * 0.8) + 80 * 5e-6)


def test_a_step_that_swaps_takes_longer() -> None:
    clock = VirtualClock()
    executor = SimExecutor(ConstantCost(), clock, block_copy_seconds=0.25)
    executor.result(executor.submit(SchedulerOutput(0, {})))
    alone = clock.now()
    executor.result(executor.submit(SchedulerOutput(1, {}, swapped_out={0: 3, 1: 4}, swapped_in={5: 0})))
    assert clock.now() - 2 * alone == pytest.approx(0.75)
