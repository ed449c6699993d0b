"""Compares Chairlift with llama-server and OpenVINO GenAI on sessions of agents, with equally large KV memory.

    python -m benchmarks.agent_servers [--servers lru,expected-use,llama-slots,llama-cache,openvino] [--sessions 32]
        [--turns 20] [--scale 0.0125] [--pool-share 0.33] [--max-num-seqs 8] [--llama-slots 4] [--seconds 120]
        [--warmup-seconds 45] [--seeds 0,1,2] [--model MODEL.gguf] [--openvino-model FOLDER] [--peers FOLDER] [--json]

Each system starts anew for each seed, in an order that rotates, answers the sessions of `benchmarks.agents` in a closed
loop, and is stopped after --seconds. The first sessions are under way, each at a random turn, whose prompt has all of
the earlier ones. Turns that ended in the first --warmup-seconds are not counted. A failed call is repeated. The KV
memory of each system has the tokens of --pool-share of the mean contexts of the sessions at a time.

lru, expected-use   `chairlift serve` with this policy of eviction
llama-slots         llama-server, whose slots share the KV memory
llama-cache         the same with half of the memory, and the other half for prompts that have left their slots
                    (--cache-ram)
openvino            ContinuousBatchingPipeline with prefix caching

Outputs have forced lengths, and where the system can do it (not OpenVINO), forced tokens. Values are medians over the
seeds, with their ranges.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import numpy as np
from benchmarks.agents import BLOCK_SIZE, Values, mean_context
from benchmarks.common import print_result, ratios, results_table, spread
from benchmarks.peers.environment import default_folder, environment
from benchmarks.peers.llamacpp import build
from benchmarks.peers.openvino import REQUIREMENTS
from benchmarks.peers.workers.llamacpp_run import free_port, running_server
from benchmarks.server_process import server_process

from chairlift.engine.startup.pool_plan import kv_slot_bytes
from chairlift.lab.workload.agent_sessions import AgentSessions
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.request_feed import RequestFeed
from chairlift.loading.model_source import GGUFSource
from chairlift.loading.resolve import resolve_model

OURS: Final = ("lru", "expected-use")
RETRY_SECONDS: Final = 0.2


@dataclass(slots=True)
class Answer:
    """An answer with its times, in seconds of `time.perf_counter`.

    Attributes:
        end: infinity while it is not complete.
        num_cached_tokens: prompt tokens that the system had; None if it does not say.
        num_failures: calls that failed before.
    """

    due: float
    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    first_token_time: float = 0.0
    end: float = math.inf
    num_cached_tokens: int | None = None
    num_failures: int = 0


class System(Protocol):
    """Answers requests."""

    async def complete(self, item: WorkloadRequest, answer: Answer) -> None: ...


# -- systems -------------------------------------------------------------------------------------------------------


class HTTPServer:
    """A server with the API of OpenAI."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    @classmethod
    @asynccontextmanager
    async def at(cls, url: str) -> AsyncIterator[HTTPServer]:
        """The server at this URL, with connections that are closed at the end of the context."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits, trust_env=False) as client:
            yield cls(client)

    async def complete(self, item: WorkloadRequest, answer: Answer) -> None:
        body = {
            "prompt": list(item.prompt_token_ids),
            "max_tokens": item.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "logit_bias": {str(item.output_token): 100},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        while not await self._stream(body, answer):
            answer.num_failures, answer.first_token_time = answer.num_failures + 1, 0.0
            await asyncio.sleep(RETRY_SECONDS)
        answer.token_ids = _output(item)

    async def _stream(self, body: dict[str, Any], answer: Answer) -> bool:
        """Send one call; returns whether it was answered completely."""
        is_complete = False
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == 400:
                raise SystemExit((await response.aread()).decode(errors="replace"))
            async for line in response.aiter_lines():
                if not line.startswith("data: {") or "error" in (record := json.loads(line[6:])):
                    continue
                answer.first_token_time = answer.first_token_time or time.perf_counter()
                if usage := record.get("usage"):
                    is_complete = usage["completion_tokens"] == body["max_tokens"]
                    answer.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return is_complete


class PipelineProcess:
    """OpenVINO GenAI in a process that reads requests, and writes the tokens of each step."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._running: dict[str, tuple[Answer, asyncio.Event]] = {}
        self._reader = asyncio.create_task(self._read())

    async def complete(self, item: WorkloadRequest, answer: Answer) -> None:
        assert self._process.stdin is not None
        record = {"id": item.request_id, "prompt": list(item.prompt_token_ids), "output_len": item.output_len}
        while len(answer.token_ids) < item.output_len:
            if answer.token_ids:  # A pipeline without free blocks ends requests.
                answer.num_failures, answer.first_token_time, answer.token_ids = answer.num_failures + 1, 0.0, []
                await asyncio.sleep(RETRY_SECONDS)
            done = asyncio.Event()
            self._running[item.request_id] = answer, done
            self._process.stdin.write(json.dumps(record).encode() + b"\n")
            await done.wait()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            record = json.loads(line)
            answer, done = self._running[record["id"]]
            answer.first_token_time = answer.first_token_time or time.perf_counter()
            answer.token_ids += record["token_ids"]
            if record["finished"]:
                done.set()
        raise SystemExit("the process of OpenVINO has ended")

    def close(self) -> None:
        self._reader.cancel()
        self._process.terminate()


@dataclass(frozen=True, slots=True)
class Systems:
    """Starts the compared systems.

    Attributes:
        kv_bytes: bytes of K and V of one token in 16 bits, which llama-server has.
    """

    args: argparse.Namespace
    kv_bytes: int

    def start(self, name: str, num_blocks: int) -> AbstractAsyncContextManager[System]:
        if name in OURS:
            return self._chairlift(name, num_blocks)
        return self._openvino(num_blocks) if name == "openvino" else self._llama(name, num_blocks * BLOCK_SIZE)

    @asynccontextmanager
    async def _chairlift(self, policy: str, num_blocks: int) -> AsyncIterator[System]:
        sizes = ("--num-kv-blocks", num_blocks, "--block-size", BLOCK_SIZE, "--max-model-len", self.args.max_model_len)
        seats = ("--max-num-seqs", self.args.max_num_seqs, "--prefix-cache-eviction-policy", policy)
        with server_process(str(self.args.model), *map(str, (*sizes, *seats))) as process:
            async with HTTPServer.at(process.url) as server:
                yield server

    @asynccontextmanager
    async def _llama(self, name: str, num_tokens: int) -> AsyncIterator[System]:
        program = build(self.args.peers, self.args.peers / "llama.cpp") / "llama-server"
        in_slots = num_tokens if name == "llama-slots" else max(num_tokens // 2, self.args.max_model_len + BLOCK_SIZE)
        cache_mib = (num_tokens - in_slots) * self.kv_bytes >> 20
        slots = ["--parallel", self.args.llama_slots, "--kv-unified", "--ctx-size", in_slots]
        others = ["--threads", len(os.sched_getaffinity(0)), "--no-context-shift", "--no-webui"]
        command = [program, "--model", self.args.model, *slots, "--cache-ram", cache_mib, *others]
        port = free_port()
        with running_server([str(word) for word in command], port):
            async with HTTPServer.at(f"http://127.0.0.1:{port}") as server:
                yield server

    @asynccontextmanager
    async def _openvino(self, num_blocks: int) -> AsyncIterator[System]:
        python = environment(self.args.peers / "openvino", REQUIREMENTS)
        options = {
            "model": str(self.args.model),
            "seats": self.args.max_num_seqs,
            "num_tokens": num_blocks * BLOCK_SIZE,
        }
        command = [str(python), "-m", "benchmarks.peers.workers.openvino_sessions", json.dumps(options)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 20)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        pipeline = PipelineProcess(process)
        try:
            yield pipeline
        finally:
            pipeline.close()
            await process.wait()


# -- sessions under way --------------------------------------------------------------------------------------------


def under_way(workload: Sequence[WorkloadRequest], concurrency: int, seed: int) -> list[WorkloadRequest]:
    """Begin each of the first sessions at a random turn, whose prompt has the tokens of the earlier ones."""
    rng, kept = np.random.default_rng([seed, 1]), {item.request_id: item for item in workload}
    for number in range(concurrency):
        turns = [item for item in workload if item.request_id.startswith(f"s{number}-")]
        called = [item for item in workload if item.request_id.startswith(f"s{number}.sub-")]
        start = int(rng.integers(len(turns)))
        earlier = {turn.request_id for turn in turns[:start]}
        tokens = [token for turn in turns[:start] for token in (*turn.prompt_token_ids, *_output(turn))]
        first = turns[start]
        kept[first.request_id] = replace(
            first, arrival=0.0, prompt_token_ids=[*tokens, *first.prompt_token_ids], follows=None, continues=None
        )
        gone = earlier | ({item.request_id for item in called} if called and called[0].follows in earlier else set())
        kept = {name: item for name, item in kept.items() if name not in gone}
    return list(kept.values())


def _output(item: WorkloadRequest) -> list[int]:
    assert item.output_token is not None
    return [item.output_token] * item.output_len


# -- runs ----------------------------------------------------------------------------------------------------------


async def answer_sessions(system: System, workload: Sequence[WorkloadRequest], seconds: float) -> dict[str, Answer]:
    """Send each request when it is due, until all are answered or the time is over."""
    feed, answers, running = RequestFeed(workload), dict[str, Answer](), dict[asyncio.Task[None], WorkloadRequest]()
    start = time.perf_counter()
    while (running or not feed.is_exhausted) and (now := time.perf_counter() - start) < seconds:
        for item in feed.pop_due(now):
            answers[item.request_id] = answer = Answer(start + item.arrival, len(item.prompt_token_ids))
            running[asyncio.create_task(system.complete(item, answer))] = item
        next_time = min(seconds, feed.next_time() or seconds)
        pause = asyncio.create_task(asyncio.sleep(max(0.0, start + next_time - time.perf_counter())))
        done, _ = await asyncio.wait([*running, pause], return_when=asyncio.FIRST_COMPLETED)
        pause.cancel()
        for task in done & running.keys():
            task.result()
            item, end = running.pop(task), time.perf_counter()
            answers[item.request_id].end = end
            feed.finish(item.request_id, end - start, [*item.prompt_token_ids, *answers[item.request_id].token_ids])
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)  # llama-server ends when all connections are closed.
    return answers


def values_of(answers: Sequence[Answer], seconds: float, warmup_seconds: float) -> Values:
    """The figures of the answers that ended after the warm-up, which begins when the first one is due."""
    start = min(each.due for each in answers)
    done = [each for each in answers if start + warmup_seconds <= each.end < math.inf]
    ttfts = [each.first_token_time - each.due for each in done] or [math.nan]
    p50, p95 = np.quantile(ttfts, (0.5, 0.95)).tolist()
    values = {"turns/h": len(done) / (seconds - warmup_seconds) * 3600, "TTFT P50, s": p50, "TTFT P95, s": p95}
    values["failed calls"] = sum(each.num_failures for each in answers)
    if done and all(each.num_cached_tokens is not None for each in done):
        cached = sum(each.num_cached_tokens or 0 for each in done)
        values["hit rate"] = cached / sum(each.num_prompt_tokens for each in done)
    return values


# -- report --------------------------------------------------------------------------------------------------------


def run_seed(systems: Systems, names: Sequence[str], seed: int) -> dict[str, Values]:
    """Run all systems on the sessions of a seed."""
    args = systems.args
    load = AgentSessions(4 * args.sessions, args.sessions, args.scale, args.turns, args.max_model_len - 1)
    sessions = load.requests(seed, 1000)
    workload = under_way(sessions, args.sessions, seed)
    share = args.pool_share * args.sessions * mean_context(sessions)
    num_blocks = round(max(args.max_model_len + BLOCK_SIZE, share) / BLOCK_SIZE)
    found = {}
    for name in names:

        async def answer(name: str = name) -> dict[str, Answer]:
            async with systems.start(name, num_blocks) as system:
                return await answer_sessions(system, workload, args.seconds)

        found[name] = values_of(list(asyncio.run(answer()).values()), args.seconds, args.warmup_seconds)
        print(f"seed {seed}, {num_blocks * BLOCK_SIZE} tokens, {name}: {found[name]}", file=sys.stderr)
    return found


def ratio_lines(results: dict[str, list[Values]]) -> list[str]:
    """The turns per hour of the default policy, relative to each other system."""
    own = [values["turns/h"] for values in results[OURS[1]]]
    return [
        f"turns/h of {OURS[1]} / {name}: {spread(ratios(own, [values['turns/h'] for values in rows]))}"
        for name, rows in results.items()
        if name != OURS[1]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", default="lru,expected-use,llama-slots,llama-cache,openvino")
    parser.add_argument("--sessions", type=int, default=32, help="sessions at a time")
    parser.add_argument("--turns", type=int, default=20, help="turns of the median session")
    parser.add_argument("--scale", type=float, default=0.0125, help="factor of the lengths in tokens")
    parser.add_argument("--pool-share", type=float, default=1 / 3)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--llama-slots", type=int, default=4, help="slots of llama-server, which has 4 by default")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--warmup-seconds", type=float, default=45.0)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--model", help="a .gguf file; default: that of chairlift serve")
    parser.add_argument(
        "--openvino-model", type=Path, help="folder of an IR for OpenVINO, which else reads the same file"
    )
    parser.add_argument("--peers", type=Path, default=default_folder(), help="folder of the programs of others")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the tables")
    args = parser.parse_args()
    source = resolve_model(args.model)
    if not isinstance(source, GGUFSource):
        raise SystemExit(f"--model {args.model}: this must be a .gguf file, which all systems can read")
    args.model = source.path
    names, results = args.servers.split(","), dict[str, list[Values]]()
    for number, seed in enumerate(map(int, args.seeds.split(","))):
        first = number % len(names)
        found = run_seed(Systems(args, kv_slot_bytes(source.config(), "float16")), names[first:] + names[:first], seed)
        for name in names:
            results.setdefault(name, []).append(found[name])
    lines = ratio_lines(results) if OURS[1] in results else []
    print_result("agent_servers", vars(args), results, [results_table(results), *lines], as_json=args.json, width=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
