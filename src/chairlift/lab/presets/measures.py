"""The measures of studies: the use of KV memory, hits of the prefix cache, fairness, and the cost of preemption."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Final

from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.queues.fair_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from chairlift.errors import ConfigError
from chairlift.events import SLOT_KINDS, Event, EventSink, RequestArrived, Step
from chairlift.lab.presets.study import StudySystem, at_rate
from chairlift.lab.sim.cost_model import StepShape, num_causal_pairs
from chairlift.lab.sim.roofline import block_copy_seconds
from chairlift.lab.sim.simulator import simulate
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.traces import MooncakeLine, json_records
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams

WARM_UP_SHARE: Final = 0.1
"""The share of the requests that are admitted before the first counted step."""


def measure_memory_use(system: StudySystem, seed: int) -> dict[str, float]:
    """Simulate a system at the rate of the workload, or with all requests at once: slots by use, running requests and
    throughput in the steady state of the run."""
    return measure_memory(system, seed, system.study.measures)


def measure_memory(system: StudySystem, seed: int, measures: Sequence[str]) -> dict[str, float]:
    """Simulate the requests of a system, and return the measures (see `SteadyStateTally`)."""
    requests = system.requests(seed)
    tally = SteadyStateTally(system.workload.get("num_outputs", 1) * len(requests))
    simulate_outputs(system, at_rate(requests, system.workload.get("request_rate", math.inf)), tally)
    return {name: tally.value(name) for name in measures}


class SteadyStateTally:
    """An event sink that adds up the steps between the admission of WARM_UP_SHARE of the requests and of the last one.

    If all requests arrive at once, the queue is not empty after any of these steps. The kinds of slots need no
    correction at the end, because the length of every request is forced and equals its declared limit.
    """

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._admitted: set[str] = set()
        self._sums: Counter[str] = Counter()
        self._most_held = self._most_written = self._num_fitting = 0

    def emit(self, event: Event) -> None:
        if not isinstance(event, Step):
            return
        self._most_held = max(self._most_held, _held(event))
        self._most_written = max(self._most_written, event.token_states)
        if len(self._admitted) < self._num_requests:
            self._admitted.update(event.admitted)
            if WARM_UP_SHARE * self._num_requests <= len(self._admitted) < self._num_requests:
                seconds, rows = event.time - event.scheduled_time, event.num_running
                sums = {kind: getattr(event, kind) for kind in SLOT_KINDS}
                sums |= {"steps": 1, "rows": rows, "seconds": seconds, "row_seconds": rows * seconds}
                self._sums.update(sums, finished=len(event.finished), saved=event.saved, held=_held(event))
            num_slots = sum(getattr(event, kind) for kind in SLOT_KINDS)
            self._num_fitting = len(self._admitted) * num_slots // max(1, _held(event))

    def value(self, name: str) -> float:
        """Return a measure.

        Over the whole run: `held` and `written`, the largest numbers of slots that requests hold and that have tokens,
        and their difference `never_used`. Over the counted steps: `batch`, the running requests, with equal weights of
        the steps; `batch_by_time`, the same weighted by duration; `saved`, the slots saved by sharing in percent of
        those without it; `finished_per_s`; and the kinds of slots in percent of the pool, where `external` includes the
        free ones, and `waste` is all but `token_states`.

        Raises:
            ConfigError: there are too few requests, so that no step is counted.
        """
        peaks = {"held": self._most_held, "written": self._most_written}
        if name == "never_used":
            return peaks["held"] - peaks["written"]
        return peaks[name] if name in peaks else self._mean(name)

    def _mean(self, name: str) -> float:
        sums = self._sums
        if not sums["steps"]:
            raise ConfigError(
                f"num_prompts={self._num_requests} is too small: all requests were admitted at once. Use more than "
                f"{self._num_fitting}, which is about how many fit into the KV memory together."
            )
        num_slots = sum(sums[kind] for kind in SLOT_KINDS)
        shares = {kind: 100 * sums[kind] / num_slots for kind in SLOT_KINDS}
        shares["external"] += shares["free"]
        means = {
            "batch": sums["rows"] / sums["steps"],
            "batch_by_time": sums["row_seconds"] / sums["seconds"],
            "saved": 100 * sums["saved"] / (sums["held"] + sums["saved"]),
            "finished_per_s": sums["finished"] / sums["seconds"],
            "waste": 100 - shares["token_states"],
        }
        return (means | shares)[name]


def _held(step: Step) -> int:
    return step.token_states + step.reserved + step.internal


def simulate_outputs(system: StudySystem, items: Sequence[WorkloadRequest], events: EventSink) -> None:
    """Simulate requests in order of arrival, with the outputs per prompt of the workload.

    Memory that is reserved has no beam search, so that beams are independent outputs there.
    """
    count = system.workload.get("num_outputs", 1)
    has_beams = system.workload.get("beam_search", False) and system.config.pool.kv == "paged"
    requests_for = None if count == 1 else partial(siblings, count=count, has_beams=has_beams)
    result = simulate(items, system.config, system.cost_model, events, requests_for=requests_for)
    assert not result.rejected, result.rejected[0]


def siblings(item: WorkloadRequest, count: int, has_beams: bool) -> list[Request]:
    """Return `count` requests for the outputs or beams of one prompt, of which the first is the leader."""
    leader_id = f"{item.request_id}-0"
    params = SamplingParams(
        n=count if has_beams else 1, ignore_eos=True, max_tokens=item.output_len, use_beam_search=has_beams
    )
    return [
        Request(
            f"{item.request_id}-{index}",
            list(item.prompt_token_ids),
            params,
            item.output_len,
            arrival_time=item.arrival,
            leader_id=leader_id if index else None,
            output_len=item.output_len,
        )
        for index in range(count)
    ]


def measure_cache_hits(system: StudySystem, _seed: int) -> dict[str, float]:
    """The hit rate of a system over a trace with block hashes. Its pool has `num_blocks` blocks; null: all blocks.

    Requests follow each other on the engine's own block pool, without time: each finds the longest cached prefix of its
    blocks, computes and caches the others, and releases all of them.
    """
    assert system.study.trace is not None
    hashes = read_hashes(system.study.trace, system.count)
    return {"hit_rate": hit_rate(hashes, system.engine["num_blocks"] or len(set().union(*hashes)))}


@lru_cache(maxsize=1)
def read_hashes(path: Path, limit: int) -> list[list[bytes]]:
    """The hashes of the blocks of the first `limit` requests of a trace in Mooncake's format.

    Raises:
        ConfigError: the trace cannot be read, has no blocks, or an id that is not from 0 to 2**64 - 1.
    """
    hashes = []
    for place, line in islice(json_records(path, MooncakeLine), limit):
        for number in line.hash_ids:
            if not 0 <= number < 1 << 64:
                raise ConfigError(f"{place}: hash_ids must be from 0 to 2**64 - 1, got {number}: correct the trace")
        hashes.append([number.to_bytes(8) for number in line.hash_ids])
    if not any(hashes):
        raise ConfigError(f"trace={path}: the requests have no hash_ids: give a trace of requests with blocks")
    return hashes


def hit_rate(requests: Sequence[Sequence[bytes]], num_blocks: int) -> float:
    """The share of the blocks of all requests that are found in the cache. Of a request that is larger than the pool,
    only the first blocks are stored."""
    pool, num_hits = BlockPool(num_blocks), 0
    for hashes in requests:
        stored = hashes[:num_blocks]
        num_found = next((index for index, name in enumerate(stored) if pool.find(name) is None), len(stored))
        blocks = [block for name in stored[:num_found] if (block := pool.find(name)) is not None]
        pool.share(blocks)
        blocks += pool.allocate(len(stored) - num_found)
        for block, block_hash in zip(blocks, stored, strict=True):
            pool.register(block, block_hash)
        pool.release(reversed(blocks))
        num_hits += num_found
    return num_hits / sum(map(len, requests))


def measure_service_gap(system: StudySystem, seed: int) -> dict[str, float]:
    """Simulate a system with the clients and the rates of its workload, and measure until the last arrival the
    difference between the services that clients received."""
    requests = system.requests(seed)
    tally = ServiceTally(requests[-1].arrival)
    simulate(requests, system.config, system.cost_model, tally)
    return {"service_gap": tally.gap, "largest_service_gap": tally.largest_gap}


class ServiceTally:
    """An event sink that adds up the service of each tenant until a time, with the costs of `core.queues.fair_queue`.

    The tokens of a prompt that are not cached count when its request is first admitted, and an output token when it is
    sampled.

    Attributes:
        services: the service of each tenant.
        tenants: the tenant of each request.
        gap: the difference between the largest and the smallest service; largest_gap: the largest one after a step.
    """

    def __init__(self, end: float = math.inf) -> None:
        self.services: dict[str, float] = defaultdict(float)
        self.gap = self.largest_gap = 0.0
        self._end = end
        self.tenants: dict[str, str] = {}
        self._prompts: dict[str, int] = {}

    def emit(self, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self.tenants[event.request_id] = event.tenant
            self._prompts[event.request_id] = event.num_prompt_tokens
            self.services[event.tenant] += 0.0
        elif isinstance(event, Step) and event.time <= self._end:
            self._add(event)
            self.gap = max(self.services.values()) - min(self.services.values())
            self.largest_gap = max(self.largest_gap, self.gap)

    def _add(self, step: Step) -> None:
        num_computed = dict(zip(step.request_ids, step.num_computed, strict=True))
        for request_id in step.admitted:
            if (prompt_len := self._prompts.pop(request_id, None)) is not None:
                self.add_service(
                    self.tenants[request_id], PROMPT_TOKEN_COST * (prompt_len - num_computed.get(request_id, 0))
                )
        for request_id, num_new in zip(step.request_ids, step.num_new, strict=True):
            self.add_service(self.tenants[request_id], OUTPUT_TOKEN_COST * num_new)

    def add_service(self, tenant: str, cost: float) -> None:
        self.services[tenant] += cost


def measure_preemption_cost(system: StudySystem, _seed: int) -> dict[str, float]:
    """Compute the time in which a preempted request gets its K and V again: by a swap out and in, and recomputed, with
    the block size of a system."""
    num_tokens, block_size = system.workload["num_tokens"], system.engine["block_size"]
    swapped = -(-num_tokens // block_size) * block_copy_seconds(block_size, system.model, system.device)
    recomputed = system.cost_model.seconds(StepShape(num_tokens, 1, 1, num_tokens, num_causal_pairs(0, num_tokens)))
    return {
        "swap_out_ms": swapped * 1e3,
        "swap_ms": 2 * swapped * 1e3,
        "recompute_ms": recomputed * 1e3,
        "swap_by_recompute": 2 * swapped / recomputed,
    }
