"""Measures the cost of HTTP: the same load through `chairlift serve` and through `LLM` in another process, alternating.

    python benchmarks/http_cost.py [MODEL] [--streams 64] [--input-len 32] [--output-len 64] [--repeats 3]
                                   [--num-threads N] [--no-ttft]

It measures the CPU seconds per output token of the engine process, the HTTP process and the client; the output tokens
per second of both ways; the chunks that the server writes for each output token (headers and the end of a stream are
two further writes); and the time that HTTP adds to the first token of a single request. Lengths are forced, prompts are
token ids, and answers are streamed. The client uses the same CPU as the engine, so it does little: it waits with a
selector and searches for the ends of chunks. The first run of each way is not counted.

The script prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from chairlift.lab.bench.machine import machine_facts

NUM_TTFTS = 15
ENGINE_MODULE = "chairlift.engine.process.engine_process"
VOCABULARY = range(1000, 20000)
END = b"0\r\n\r\n"
CHUNK = re.compile(rb"\r\n[1-9a-f][0-9a-f]*\r\n")


@dataclass(frozen=True, slots=True)
class CostRun:
    """One run with the CPU seconds of each process by its name."""

    seconds: float
    output_tokens: int
    cpu_seconds: dict[str, float]
    writes: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    def cpu_us(self, process: str) -> float:
        """CPU microseconds per output token; 0 for a process that the run does not have."""
        return 1e6 * self.cpu_seconds.get(process, 0.0) / self.output_tokens


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Create random prompts, so that no prompt has a prefix of another one."""
    chosen = random.Random(seed)
    return [[chosen.choice(VOCABULARY) for _ in range(length)] for _ in range(count)]


# -- through LLM ----------------------------------------------------------------------------------------------------


class LlmProcess:
    """`LLM` in a separate process, which reads and writes lines of JSON."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        options = json.dumps({"model": arguments.model, "num_threads": arguments.num_threads})
        command = [sys.executable, __file__, "--worker", options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._exchange({"prompts": prompts(2, 8, 0), "output_len": 2})

    def run(self, load: list[list[int]], output_len: int) -> CostRun:
        return CostRun(**self._exchange({"prompts": load, "output_len": output_len}))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        reply: dict[str, Any] = json.loads(self._process.stdout.readline())
        return reply


def worker(options: dict[str, Any]) -> None:
    """Run the process of LlmProcess: read one message per line, and write one reply per line."""
    from chairlift import LLM, SamplingParams

    llm = LLM(**options)
    for line in sys.stdin:
        message = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=message["output_len"], ignore_eos=True)
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(message["prompts"], params, use_tqdm=False)
        run = {
            "seconds": time.perf_counter() - wall,
            "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
            "cpu_seconds": {"engine": time.process_time() - cpu},
        }
        print(json.dumps(run), flush=True)


# -- through HTTP ---------------------------------------------------------------------------------------------------


class ServeProcess:
    """`chairlift serve` in a separate process, with a client that counts chunks."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        threads = [] if arguments.num_threads is None else ["--num-threads", str(arguments.num_threads)]
        model = [] if arguments.model is None else [arguments.model]
        command = [sys.executable, "-m", "chairlift", "serve", *model, "--port", "0", *threads]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        found = None
        while found is None:
            found = re.search(r"ready in .*:(\d+)/v1 answers", self._process.stderr.readline())
        self.address = ("127.0.0.1", int(found[1]))
        subprocess.Popen(["cat"], stdin=self._process.stderr, stdout=subprocess.DEVNULL)
        front = psutil.Process(self._process.pid)
        (engine,) = (child for child in front.children() if ENGINE_MODULE in child.cmdline())
        self._processes = {"HTTP": front, "engine": engine}

    def run(self, load: list[list[int]], output_len: int) -> CostRun:
        before = self._cpu_seconds()
        started, own = time.perf_counter(), time.process_time()
        writes, _first = stream(self.address, load, output_len)
        seconds, own = time.perf_counter() - started, time.process_time() - own
        after = self._cpu_seconds()
        cpu = {name: after[name] - before[name] for name in after}
        return CostRun(seconds, len(load) * output_len, {**cpu, "client": own}, writes)

    def ttft(self, prompt: list[int]) -> float:
        """Measure the seconds to the first chunk of one request."""
        return stream(self.address, [prompt], 1)[1]

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def _cpu_seconds(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {name: spent.user + spent.system for name, spent in times.items()}


def stream(address: tuple[str, int], load: list[list[int]], output_len: int) -> tuple[int, float]:
    """Send all requests at once and read all answers.

    Returns:
        the number of chunks of all answers, and the seconds to the first chunk.
    """
    selector = selectors.DefaultSelector()
    for _ in load:
        connection = socket.create_connection(address)
        selector.register(connection, selectors.EVENT_READ, bytearray())
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    calls = list(zip(list(selector.get_map().values()), load, strict=True))
    started, first = time.perf_counter(), 0.0
    for key, prompt in calls:
        key.fileobj.sendall(_request(prompt, output_len))  # type: ignore[union-attr]
    num_open, num_chunks = len(load), 0
    while num_open:
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            assert data, "the server closed the connection before the end of the answer"
            key.data.extend(data)
            if not first and b"data: " in key.data:
                first = time.perf_counter() - started
            if key.data.endswith(END):
                assert b" 200 OK" in key.data[:20], bytes(key.data[:500])
                num_chunks += len(CHUNK.findall(key.data))
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                num_open -= 1
    return num_chunks, first


def _request(prompt: list[int], output_len: int) -> bytes:
    fields = {"prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(fields).encode()
    headers = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n".encode() + body


# -- both -----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--no-ttft", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(json.loads(arguments.worker))
        return
    with _both_processes(arguments) as (alone, served):
        runs: list[tuple[CostRun, CostRun]] = []
        for seed in range(arguments.repeats + 1):
            load = prompts(arguments.streams, arguments.input_len, seed)
            pair = (alone.run(load, arguments.output_len), served.run(load, arguments.output_len))
            runs += [pair] if seed else []
            print(f"{pair[0].tokens_per_s:.0f} and {pair[1].tokens_per_s:.0f} output tokens/s", file=sys.stderr)
        ttfts = [] if arguments.no_ttft else _ttfts(alone, served)
    _print_report(arguments, runs, ttfts)


@contextmanager
def _both_processes(arguments: argparse.Namespace) -> Iterator[tuple[LlmProcess, ServeProcess]]:
    with closing(LlmProcess(arguments)) as alone, closing(ServeProcess(arguments)) as served:
        served.run(prompts(2, 8, 0), 2)
        yield alone, served


def _ttfts(alone: LlmProcess, served: ServeProcess) -> list[tuple[float, float]]:
    """Measure the TTFT of short, different prompts in seconds, alternating between both ways."""
    return [(alone.run([prompt], 1).seconds, served.ttft(prompt)) for prompt in prompts(NUM_TTFTS, 8, 1000)]


def _print_report(
    arguments: argparse.Namespace, runs: list[tuple[CostRun, CostRun]], ttfts: list[tuple[float, float]]
) -> None:
    title = f"{arguments.streams} streams of {arguments.input_len} prompt and {arguments.output_len} output tokens"
    table = Table("medians", "LLM in one process", "chairlift serve", title=title)
    speeds = [median(run.tokens_per_s for run in side) for side in zip(*runs, strict=True)]
    table.add_row("output tokens/s", *(f"{speed:.1f}" for speed in speeds))
    cost = median(1 - served.tokens_per_s / alone.tokens_per_s for alone, served in runs)
    table.add_row("lost to HTTP", "", f"{cost:.1%}")
    sides = list(zip(*runs, strict=True))
    cpu = {name: [median(run.cpu_us(name) for run in side) for side in sides] for name in ("engine", "HTTP", "client")}
    for name, both in cpu.items():
        table.add_row(f"CPU µs an output token: {name}", *(f"{value:.0f}" if value else "" for value in both))
    writes = median(served.writes / served.output_tokens for _, served in runs)
    table.add_row("chunks written an output token", "", f"{writes:.3f}")
    ttft = [1e3 * median(values) for values in zip(*ttfts, strict=True)]
    if ttft:
        table.add_row("first token, alone: ms", *(f"{value:.1f}" for value in ttft))
        added = 1e3 * median(served - alone for alone, served in ttfts)
        table.add_row("added by HTTP: ms", "", f"{added:.1f}")
    Console(width=120).print(table)
    figures = {
        "machine": asdict(machine_facts()),
        "workload": {name: getattr(arguments, name) for name in ("streams", "input_len", "output_len", "num_threads")},
        "output_tokens_per_s": {"llm": [a.tokens_per_s for a, _ in runs], "serve": [s.tokens_per_s for _, s in runs]},
        "lost_share": cost,
        "cpu_us_per_output_token": {name: dict(zip(("llm", "serve"), both, strict=True)) for name, both in cpu.items()},
        "chunks_per_output_token": writes,
        "ttft_seconds": {"llm": [a for a, _ in ttfts], "serve": [s for _, s in ttfts]},
    }
    print(json.dumps({"http_cost": figures}))


if __name__ == "__main__":
    main()
