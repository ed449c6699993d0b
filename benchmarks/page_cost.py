"""Measures the cost of open live pages: the same load with no, one and five readers of the page's events, alternating.

    python -m benchmarks.page_cost [MODEL] [--streams 64] [--input-len 32] [--output-len 64] [--repeats 3]
                                   [--num-threads N] [--readers 0 1 5] [--json]

It measures the CPU seconds of the server (its HTTP process and its engine process) per output token, and the output
tokens per second. A reader receives and discards the stream of `/v1/page/events` in another process, so the cost of
drawing the page in a browser is not included. The first run is not counted. Ratios are medians of the ratios of each
round to its run without readers.
"""

from __future__ import annotations

import argparse
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from statistics import median
from typing import Final

from benchmarks.common import print_result
from benchmarks.http_cost import CostRun, ServeProcess, prompts
from rich.table import Table

SETTLE_SECONDS: Final = 1.0
"""Seconds between the connection of the readers and the load, in which they receive the history."""


def read_streams(address: tuple[str, int], num_readers: int) -> None:
    """Read the events of the live page with several connections, until the process is ended."""
    selector = selectors.DefaultSelector()
    for _ in range(num_readers):
        connection = socket.create_connection(address)
        connection.sendall(b"GET /v1/page/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        selector.register(connection, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            assert key.fileobj.recv(1 << 20), "the server closed the stream"  # type: ignore[union-attr]


@contextmanager
def readers(address: tuple[str, int], num_readers: int) -> Iterator[None]:
    """Run readers in a process of their own."""
    if not num_readers:
        yield
        return
    command = [sys.executable, "-m", "benchmarks.page_cost", "--read", address[0], str(address[1]), str(num_readers)]
    process = subprocess.Popen(command)
    try:
        time.sleep(SETTLE_SECONDS)
        yield
        assert process.poll() is None, "the readers ended early"
    finally:
        process.kill()
        process.wait()


def cpu_us(run: CostRun) -> float:
    """CPU microseconds of the server's processes per output token."""
    return run.cpu_us("HTTP") + run.cpu_us("engine")


def measure(arguments: argparse.Namespace) -> dict[int, list[CostRun]]:
    """Run every number of readers in each round; returns the runs by number of readers."""
    runs: dict[int, list[CostRun]] = {count: [] for count in arguments.readers}
    with closing(ServeProcess(arguments)) as server:
        for seed in range(arguments.repeats + 1):
            for count in arguments.readers:
                load = prompts(arguments.streams, arguments.input_len, 100 * seed + count)
                with readers(server.address, count):
                    run = server.run(load, arguments.output_len)
                runs[count] += [run] if seed else []
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--readers", type=int, nargs="+", default=[0, 1, 5])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read is not None:
        host, port, num_readers = arguments.read
        read_streams((host, int(port)), int(num_readers))
        return
    print_report(arguments, measure(arguments))


def format_spread(values: list[float]) -> str:
    """The median and the range."""
    return f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def print_report(arguments: argparse.Namespace, runs: dict[int, list[CostRun]]) -> None:
    """Print a row for each number of readers, and with `--json` a line of JSON."""
    base = runs[arguments.readers[0]]
    table = Table(
        "readers", "output tokens/s", "ratio", "CPU µs per token (range)", "ratio", "HTTP process: µs (range)"
    )
    records = []
    for count, own in runs.items():
        costs = [cpu_us(run) for run in own]
        speed_ratio = median(run.tokens_per_s / other.tokens_per_s for run, other in zip(own, base, strict=True))
        cpu_ratio = median(cpu_us(run) / cpu_us(other) for run, other in zip(own, base, strict=True))
        speed = median(run.tokens_per_s for run in own)
        http = [run.cpu_us("HTTP") for run in own]
        speeds, ratio = (f"{speed:.1f}", f"{speed_ratio:.3f}"), f"{cpu_ratio:.3f}"
        table.add_row(str(count), *speeds, format_spread(costs), ratio, format_spread(http))
        records.append(
            {
                "readers": count,
                "cpu_us_per_output_token": costs,
                "http_cpu_us_per_output_token": http,
                "cpu_ratio": cpu_ratio,
                "output_tokens_per_s": [run.tokens_per_s for run in own],
                "throughput_ratio": speed_ratio,
            }
        )
    seeds = f"seeds 100 to {100 * arguments.repeats + max(arguments.readers)}"
    print_result("page_cost", vars(arguments), records, [seeds, table], as_json=arguments.json)


if __name__ == "__main__":
    main()
