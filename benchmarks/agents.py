"""Compares the eviction policies of the prefix cache on sessions of agents, and on loads without sessions.

    python -m benchmarks.agents [--sessions 16,64] [--rounds 2] [--scale 0.0125] [--turns 20] [--pool-share 0.33]
        [--max-num-seqs 8] [--seeds 0,1,2] [--engine] [--model MODEL] [--json]

As many sessions as --sessions run at a time, and each is followed by others, --rounds in all. The pool has the tokens
of --pool-share of their mean contexts. `oracle` knows when each session continues (Belady, "A study of replacement
algorithms for a virtual-storage computer", 1966): it evicts what is used last. Because the loop is closed, the future
depends on the policy, so it is a good reference rather than a bound.

Steps are simulated, with seconds that are linear in the tokens and the pairs of attention (--cost, about those of
SmolLM2 on two cores). With --engine the same sessions run on an engine, the policies in an order that rotates with the
seeds. Values are medians over the seeds.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import numpy as np
from benchmarks.common import print_result
from rich.table import Table

from chairlift.config import EngineConfig, SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.eviction_order import EVICTION_ORDERS, EvictionOrder
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import load_decoder
from chairlift.events import Event, EventList, RequestFinished
from chairlift.lab.bench.driver import drive
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.agent_sessions import AgentSessions
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload, random_tokens
from chairlift.request import Request

POLICIES: Final = ("lru", "expected-use", "oracle")
BLOCK_SIZE: Final = 16
NEVER: Final = float("inf")
SUBAGENT_SECONDS: Final = 20.0
"""When the oracle expects a session whose sub-agent runs, after the start of the sub-agent."""

Values = dict[str, float]


# -- the oracle ----------------------------------------------------------------------------------------------------


class Oracle(EvictionOrder):
    """Evicts the block whose next use is last, by the workload."""

    def __init__(self, num_blocks: int, workload: Sequence[WorkloadRequest]) -> None:
        super().__init__(num_blocks)
        self._source = {item.request_id: item.continues or item.request_id for item in workload}
        self._delays: dict[str, float] = {}
        for item in workload:
            if item.continues is not None:
                self._delays[item.continues] = item.arrival if item.follows == item.continues else SUBAGENT_SECONDS
        self._hashes: dict[int, bytes] = {}
        self._free: dict[bytes, int] = {}
        self._times: defaultdict[bytes, dict[str, float]] = defaultdict(dict)
        self._chains: dict[str, Sequence[bytes]] = {}
        self._order: list[tuple[float, int, int]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._blocks) + len(self._hashes)

    def add(self, block_id: int, block_hash: bytes | None) -> None:
        if block_hash is None:
            super().add(block_id, None)
            return
        self._hashes[block_id], self._free[block_hash] = block_hash, block_id
        self._push(block_id)

    def remove(self, block_id: int) -> None:
        if block_id in self._blocks:
            super().remove(block_id)
        else:
            del self._free[self._hashes.pop(block_id)]

    def take(self) -> int:
        while not self._blocks:
            time, _, block_id = heapq.heappop(self._order)
            if block_id in self._hashes and -time == self._next_use(block_id):
                self.remove(block_id)
                return block_id
            if block_id in self._hashes:
                self._push(block_id)
        return super().take()

    def _next_use(self, block_id: int) -> float:
        return min(self._times.get(self._hashes[block_id], {}).values(), default=NEVER)

    def _push(self, block_id: int) -> None:
        self._count += 1
        heapq.heappush(self._order, (-self._next_use(block_id), self._count, block_id))

    def _set(self, session: str, time: float, chain: Sequence[bytes]) -> None:
        self._unset(session)
        self._chains[session] = chain
        for block in chain:
            self._times[block][session] = time

    def _unset(self, session: str) -> None:
        for block in reversed(self._chains.pop(session, ())):
            del self._times[block][session]
            if block in self._free:
                self._push(self._free[block])

    def expect(self, request: Request, chain: Sequence[bytes]) -> None:
        self._set(self._source[request.request_id], request.arrival_time, chain)

    def stop_expecting(self, request: Request) -> None:
        self._unset(self._source[request.request_id])

    def forget(self, request: Request) -> None:
        if request.num_computed_tokens == 0:
            self.stop_expecting(request)

    def finish(self, request: Request, chain: Sequence[bytes]) -> None:
        if (delay := self._delays.get(request.request_id)) is not None:
            self._set(request.request_id, self.now + delay, chain)


# -- workloads -----------------------------------------------------------------------------------------------------


def conversations(count: int, seed: int, rate: float) -> list[WorkloadRequest]:
    """Conversations of persons: 1 to 8 turns, with gaps of half a minute in the mean."""
    rng, requests = np.random.default_rng([seed, 7]), list[WorkloadRequest]()
    for number, start in enumerate(ArrivalProcess(rate).times(rng, count)):
        before: str | None = None
        for turn in range(int(rng.integers(1, 9))):
            prompt = random_tokens(rng, int(min(1000, 16 + rng.lognormal(4.5))), 1000)
            arrival = start if before is None else float(rng.exponential(30.0))
            output_len = int(rng.integers(20, 200))
            turn_id = f"c{number}-{turn}"
            requests.append(WorkloadRequest(turn_id, arrival, prompt, output_len, follows=before, continues=before))
            before = turn_id
    return requests


def single_prompts(count: int, seed: int, rate: float) -> list[WorkloadRequest]:
    """Requests with the lengths of ShareGPT, half of them with a common prefix of 256 tokens."""
    lengths = parse_lengths("hist:sharegpt-input,4..1000"), parse_lengths("hist:sharegpt-output,4..400")
    made = [
        make_workload(seed + part, count // 2, *lengths, ArrivalProcess(rate / 2), 1000, token_round=part, prefix_len=n)
        for part, n in enumerate((0, 256))
    ]
    return sorted((item for part in made for item in part), key=lambda item: item.arrival)


def mean_context(workload: Sequence[WorkloadRequest]) -> float:
    """The mean tokens of a request at its end."""
    ends: dict[str | None, int] = {None: 0}
    for item in workload:
        ends[item.request_id] = ends[item.continues] + len(item.prompt_token_ids) + item.output_len
    return fmean(list(ends.values())[1:])


# -- runs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of a step: fixed, for each token, and for each pair of attention."""

    fixed: float
    per_token: float
    per_pair: float

    def seconds(self, shape: StepShape) -> float:
        return self.fixed + self.per_token * shape.num_tokens + self.per_pair * shape.num_pairs


class Finished(NamedTuple):
    """The times and tokens of a request that has ended."""

    arrival: float
    first_token: float | None
    end: float
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(slots=True)
class Tally:
    """An event sink that keeps the end of each request."""

    finished: list[Finished] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        if isinstance(event, RequestFinished):
            times = event.arrival_time, event.first_token_time, event.time
            self.finished.append(Finished(*times, event.num_prompt_tokens, event.num_cached_tokens))

    def values(self, num_sessions: int) -> Values:
        done = self.finished
        ttfts = [each.first_token - each.arrival for each in done if each.first_token is not None]
        p50, p95 = np.quantile(ttfts, (0.5, 0.95)).tolist()
        seconds = max(each.end for each in done) - min(each.arrival for each in done)
        hit_rate = sum(each.num_cached_tokens for each in done) / sum(each.num_prompt_tokens for each in done)
        return {
            "hit rate": hit_rate,
            "TTFT P50, s": p50,
            "TTFT P95, s": p95,
            "sessions/h": num_sessions / seconds * 3600,
        }


def run_simulation(
    workload: Sequence[WorkloadRequest], policy: str, num_blocks: int, args: argparse.Namespace
) -> Values:
    """Simulate one policy; the name of the oracle is registered for the time of the run."""
    scheduler = SchedulerConfig(args.max_model_len, args.max_num_seqs, args.max_num_batched_tokens)
    pool = KVPool(num_blocks, BLOCK_SIZE, args.max_model_len, prefix_cache_eviction_policy=policy)
    tally = Tally()
    result = simulate(workload, SimConfig(scheduler, pool), LinearCost(*args.cost), tally)
    assert not result.rejected, result.rejected[0]
    return tally.values(count_sessions(workload))


def count_sessions(workload: Sequence[WorkloadRequest]) -> int:
    return sum(item.continues is None and ".sub" not in item.request_id for item in workload)


def run_policies(
    workload: Sequence[WorkloadRequest], num_blocks: int, first: int, run: Callable[..., Values], *rest: Any
) -> dict[str, Values]:
    """Run all policies on a workload, beginning with that of the number `first`."""
    orders: dict[str, Any] = EVICTION_ORDERS
    orders["oracle"] = partial(Oracle, workload=workload)
    start = first % len(POLICIES)
    found = {name: run(workload, name, num_blocks, *rest) for name in POLICIES[start:] + POLICIES[:start]}
    return {name: found[name] for name in POLICIES}


class EngineRuns:
    """Runs workloads on engines of one loaded model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._config = EngineConfig(
            model=args.model,
            max_num_seqs=args.max_num_seqs,
            max_model_len=args.max_model_len,
            max_num_batched_tokens=args.max_num_batched_tokens,
            block_size=BLOCK_SIZE,
            skip_tokenizer_init=True,
        )
        self._loaded = load_decoder(self._config)

    def run(self, workload: Sequence[WorkloadRequest], policy: str, num_blocks: int) -> Values:
        """Run one policy on an empty engine."""
        log, tally = EventList(), Tally()
        config = replace(self._config, num_kv_blocks=num_blocks)
        engine = build_engine(config, loaded=self._loaded, events=log)
        pool: BlockPool = engine.core.scheduler._kv.pool  # type: ignore[attr-defined]
        pool.order = EVICTION_ORDERS[policy](num_blocks)
        drive(engine, workload)
        for event in log.events:
            tally.emit(event)
        return tally.values(count_sessions(workload))


# -- report --------------------------------------------------------------------------------------------------------


def workloads(args: argparse.Namespace) -> dict[str, Callable[[int], list[WorkloadRequest]]]:
    """The compared loads, each by its seed."""
    made: dict[str, Callable[[int], list[WorkloadRequest]]] = {}
    for concurrency in args.sessions:
        load = AgentSessions(args.rounds * concurrency, concurrency, args.scale, args.turns, args.max_model_len - 1)
        made[f"{concurrency} sessions"] = lambda seed, load=load: load.requests(seed, 1000)  # type: ignore[misc]
    if not args.engine:
        made["conversations"] = lambda seed: conversations(150, seed, 0.3)
        made["single prompts"] = lambda seed: single_prompts(400, seed, 1.5)
    return made


def pool_blocks(name: str, workload: Sequence[WorkloadRequest], args: argparse.Namespace) -> int:
    """The size of the pool: a share of the contexts of all sessions at a time; of 8 contexts for other loads."""
    concurrency = int(name.split()[0]) if name.endswith(" sessions") else 8 / args.pool_share
    smallest = int(args.max_model_len) // BLOCK_SIZE + 1
    share = float(args.pool_share * concurrency)
    return max(smallest, round(share * mean_context(workload) / BLOCK_SIZE))


def medians(runs: Sequence[dict[str, Values]]) -> dict[str, Values]:
    return {
        policy: {name: median(run[policy][name] for run in runs) for name in runs[0][policy]} for policy in POLICIES
    }


def closed_share(values: dict[str, Values], name: str) -> float | None:
    """The share of the gap between lru and the oracle that the policy closes; None if there is none to speak of."""
    low, own, high = (values[policy][name] for policy in POLICIES)
    return (own - low) / (high - low) if high - low > 0.01 * low else None


def make_table(results: dict[str, dict[str, Values]]) -> Table:
    names = list(next(iter(results.values()))["lru"])
    table = Table("load", "policy", *names, "gap closed, hits", "sessions")
    for load, values in results.items():
        for policy in POLICIES:
            shares = [closed_share(values, name) for name in ("hit rate", "sessions/h")]
            shown = ["" if share is None or policy != "expected-use" else f"{share:.0%}" for share in shares]
            table.add_row(load, policy, *(f"{values[policy][name]:.3g}" for name in names), *shown)
    return table


def numbers(kind: type[int] | type[float]) -> Callable[[str], list[Any]]:
    """The parser of an option with numbers separated by commas."""
    return lambda text: [kind(part) for part in text.split(",")]


def session_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of the sessions and of the simulated engine, for this benchmark and `agent_cluster`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="sessions in all, as a multiple of those at a time")
    parser.add_argument("--scale", type=float, default=1 / 80, help="factor of the lengths in tokens")
    parser.add_argument("--turns", type=int, default=20, help="turns of the median session")
    parser.add_argument("--pool-share", type=float, default=1 / 3)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--cost", type=numbers(float), default="8e-3,7e-4,2.5e-7", help="fixed, per token, per pair")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the tables")
    return parser


def main() -> int:
    parser = session_parser(__doc__)
    parser.add_argument("--sessions", type=numbers(int), default="16,64")
    parser.add_argument("--seeds", type=numbers(int), default="0,1,2")
    parser.add_argument("--engine", action="store_true", help="run the sessions on an engine instead")
    parser.add_argument("--model", help="model as in chairlift serve")
    args = parser.parse_args()
    engine = EngineRuns(args) if args.engine else None
    results: dict[str, dict[str, Values]] = {}
    for name, make in workloads(args).items():
        runs = []
        for number, seed in enumerate(args.seeds):
            workload = make(seed)
            num_blocks = pool_blocks(name, workload, args)
            if engine is None:
                runs.append(run_policies(workload, num_blocks, number, run_simulation, args))
            else:
                runs.append(run_policies(workload, num_blocks, number, engine.run))
            print(f"{name}, seed {seed}, {num_blocks} blocks: {runs[-1]}", file=sys.stderr)
        results[name] = medians(runs)
    print_result("agents", vars(args), results, [make_table(results)], as_json=args.json, width=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
