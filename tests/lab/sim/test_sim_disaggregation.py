"""Disaggregated prefill and decode: the times of tokens in both stages, and instances that requests take in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim_workloads import ConstantCost

from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.lab.metrics.requests import RequestMetrics
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.disaggregation import Instances
from chairlift.lab.sim.simulator import SimConfig
from chairlift.lab.workload.request import WorkloadRequest

CONFIG = SimConfig(SchedulerConfig(64, 4, 64), KVPool(64, 4, 64), enable_prefix_caching=False)


class TokenCost:
    """A step takes a second for each token."""

    def seconds(self, shape: StepShape) -> float:
        return float(shape.num_tokens)


def requests(*arrivals: float, output_len: int = 3) -> list[WorkloadRequest]:
    return [WorkloadRequest(f"r{i}", time, [i] * 8, output_len) for i, time in enumerate(arrivals)]


def token_times(found: list[RequestMetrics]) -> dict[str, list[float]]:
    return {metrics.request_id: metrics.token_times for metrics in found}


def test_a_token_is_computed_once_and_its_k_and_v_are_transferred() -> None:
    """A prompt of 8 tokens takes 8 s, its transfer 4 s, and each further token 1 s."""
    found = Instances(1, 1, 0.5).simulate(requests(0.0), CONFIG, TokenCost())
    assert token_times(found) == {"r0": [8.0, 13.0, 14.0]}
    assert (found[0].ttft, found[0].tpot) == (8.0, 3.0)


def test_requests_take_the_instances_in_turn() -> None:
    """Two prefill instances compute two prompts at the same time, and one computes them together."""
    load = requests(0.0, 0.0)
    assert token_times(Instances(2, 1, 0.0).simulate(load, CONFIG, TokenCost())) == {
        "r0": [8.0, 10.0, 12.0],
        "r1": [8.0, 10.0, 12.0],
    }
    assert {metrics.ttft for metrics in Instances(1, 1, 0.0).simulate(load, CONFIG, TokenCost())} == {16.0}


def test_a_stage_alone() -> None:
    prefill = Instances(1, 0, 0.5).simulate(requests(2.0), CONFIG, TokenCost())
    assert token_times(prefill) == {"r0": [10.0]}
    assert (prefill[0].ttft, prefill[0].tpot) == (8.0, None)
    decode = Instances(0, 1, 0.5).simulate(requests(2.0), CONFIG, TokenCost())
    assert token_times(decode) == {"r0": [2.0, 3.0, 4.0]}


def test_decodes_do_not_wait_for_prompts() -> None:
    """In one engine, the prompt of the second request delays the tokens of the first."""
    load = requests(0.0, 9.0, output_len=12)
    (first, _) = Instances(1, 1, 0.0).simulate(load, CONFIG, TokenCost())
    assert first.tpot is not None
    assert first.tpot < 2.0
    assert max(first.itls) == 2.0


def test_requests_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(AssertionError, match="max_model_len"):
        Instances(1, 0, 0.0).simulate([replace(requests(0.0)[0], prompt_token_ids=[0] * 80)], CONFIG, ConstantCost())
