"""Disaggregated prefill and decode, which only the simulator has (Zhong et al., "DistServe", OSDI'24).

    arrival --> prefill instance: prompt and first token --> transfer of K and V --> decode instance: all other tokens

A prefill instance does not depend on the decode instances, so all of its requests are simulated first. Requests take
the instances of a stage in turn. Each instance is a separate simulated engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chairlift.lab.metrics.requests import RequestMetrics, RequestTally
from chairlift.lab.sim.cost_model import CostModel, StepShape
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.request import WorkloadRequest


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """The cost model of a decode instance, which received K and V of all tokens but the last one of each request.

    The simulated engine computes these tokens in the step that admits the request, and again after a preemption. Here
    each row of a step costs one token.
    """

    cost_model: CostModel

    def seconds(self, shape: StepShape) -> float:
        return self.cost_model.seconds(shape._replace(num_tokens=shape.num_seqs, num_pairs=shape.num_context))


@dataclass(frozen=True, slots=True)
class Instances:
    """The numbers of instances, and the seconds for which K and V of a token are transferred between them.

    Without prefill instances, the first token exists when a request arrives. Without decode instances, it is the only
    one.
    """

    prefill: int
    decode: int
    transfer_seconds: float

    def simulate(
        self, requests: Sequence[WorkloadRequest], config: SimConfig, cost_model: CostModel
    ) -> list[RequestMetrics]:
        """Simulate requests, which must be in order of arrival and fit, to their end."""
        first: dict[str, RequestMetrics] = {}
        if self.prefill:
            prompts = [replace(request, output_len=1, max_tokens=None) for request in requests]
            first = _simulate_stage(prompts, self.prefill, config, cost_model)
        if not self.decode:
            return list(first.values())
        received = [self._received(request, first.get(request.request_id)) for request in requests]
        budget = config.scheduler.max_model_len * config.scheduler.max_num_seqs
        decoding = replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=budget))
        decoded = _simulate_stage(received, self.decode, decoding, DecodeCost(cost_model))
        return [_joined(request, first.get(request.request_id), decoded[request.request_id]) for request in requests]

    def _received(self, request: WorkloadRequest, first: RequestMetrics | None) -> WorkloadRequest:
        """The request as it reaches a decode instance, with its first token."""
        arrival = request.arrival
        if first is not None:
            arrival = first.token_times[0] + self.transfer_seconds * len(request.prompt_token_ids)
        prompt = [*request.prompt_token_ids, 0]
        return replace(request, arrival=arrival, prompt_token_ids=prompt, output_len=request.output_len - 1)


def _joined(request: WorkloadRequest, first: RequestMetrics | None, decoded: RequestMetrics) -> RequestMetrics:
    if first is None:
        first = replace(decoded, arrival=request.arrival, token_times=[request.arrival])
    return replace(first, token_times=first.token_times + decoded.token_times)


def _simulate_stage(
    requests: Sequence[WorkloadRequest], num_instances: int, config: SimConfig, cost_model: CostModel
) -> dict[str, RequestMetrics]:
    """The metrics by request id. Each instance takes the next request, by arrival, in turn."""
    found: dict[str, RequestMetrics] = {}
    tally = RequestTally(lambda _, metrics: found.update({metrics.request_id: metrics}))
    ordered = sorted(requests, key=lambda request: request.arrival)
    for index in range(num_instances):
        result = simulate(ordered[index::num_instances], config, cost_model, tally)
        assert not result.rejected, result.rejected[0]
    return found
