"""Measures what one costly call does to the other callers of a server: the delays of a stream and of /health.

    python -m benchmarks.caller_isolation [--attack NAME ...] [--repeats 1] [--bound 90] [--server-python PYTHON]
                                          [--json] [-- SERVE OPTIONS]

Each attack has a server of its own: `chairlift serve` with the default model, default options and two API keys. A
stream of the key `other` and a caller of /health run in a process beside it. The calls of the key `attacker` are sent
when the stream runs, and the measurement ends when they are answered, or `--bound` seconds later, when their client
disconnects.
The row `nothing` has no attack: its delays are those of the machine.

Some attacks also measure calls of the key `other`: how many of them fail, and the slowest one.

`--server-python` serves the code of another checkout, for a comparison before and after a change. The script prints a
table and, as the last line, JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from benchmarks.common import bearer_client, print_result
from benchmarks.server_process import ServerProcess, Usage, checkout_of, server_process, write_keys
from benchmarks.victim import VictimProcess, VictimReport, victim_beside
from rich.console import RenderableType
from rich.table import Table

from chairlift.lab.bench.machine import machine_facts

ATTACKER, OTHER = "attacker", "other"
WARM_UP_GAPS: Final = 50
STREAM_TOKENS: Final = 6000
"""Longer than most attacks last: the next stream would wait in the queue with what the attack has queued."""

WORDS: Final = ("boarding", "the", "chairlift", "never", "stops", "for", "a", "rider", "who", "takes", "next", "seat")
VOCABULARY: Final = 49_000
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

LEFT: Final = 0
"""The status of a call whose client has disconnected at the bound."""

BROKEN: Final = -1
"""The status of a call whose connection has failed."""

Body = dict[str, Any]


@dataclass(slots=True)
class CallTimes:
    """The calls of one key in one attack.

    Attributes:
        statuses: of the answers, or LEFT or BROKEN.
        seconds: of each call.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    @property
    def num_failed(self) -> int:
        return sum(count for status, count in self.statuses.items() if status != 200)

    def figures(self) -> dict[str, Any]:
        """The figures for JSON."""
        slowest = round(max(self.seconds, default=0.0), 3)
        statuses = {str(status): count for status, count in sorted(self.statuses.items())}
        return {"calls": len(self.seconds), "failed": self.num_failed, "slowest_s": slowest, "statuses": statuses}


@dataclass(slots=True)
class AttackRun:
    """The clients of an attack, and the times of their calls.

    Attributes:
        size: multiplies the lengths of all large values.
    """

    clients: dict[str, httpx.AsyncClient]
    bound: float
    size: float
    rng: random.Random
    calls: dict[str, CallTimes] = field(default_factory=lambda: {ATTACKER: CallTimes(), OTHER: CallTimes()})

    def scaled(self, length: int) -> int:
        return max(1, round(length * self.size))

    async def post(self, key: str, path: str, body: Body) -> None:
        """Make one call, and leave at the bound."""
        content = await asyncio.to_thread(lambda: json.dumps(body).encode())
        started, status = time.perf_counter(), BROKEN
        try:
            async with asyncio.timeout(self.bound):
                headers = {"Content-Type": "application/json"}
                status = (await self.clients[key].post(path, content=content, headers=headers)).status_code
        except TimeoutError:
            status = LEFT
        except httpx.HTTPError as error:
            print(f"{key}: {error!r}", file=sys.stderr)
        self.calls[key].statuses[status] += 1
        self.calls[key].seconds.append(time.perf_counter() - started)

    async def post_all(self, key: str, path: str, bodies: Sequence[Body]) -> None:
        """Make calls at once."""
        await asyncio.gather(*(self.post(key, path, body) for body in bodies))

    def text(self, num_bytes: int) -> str:
        """Words at random, so that tokenizers and caches have something to do."""
        some = " ".join(self.rng.choices(WORDS, k=4000))
        return (some * (num_bytes // len(some) + 1))[:num_bytes]


# -- attacks -------------------------------------------------------------------------------------------------------


async def nothing(run: AttackRun) -> None:
    await asyncio.sleep(run.scaled(10))


async def truncated_prompt(run: AttackRun) -> None:
    """A prompt of 5 MB with truncate_prompt_tokens."""
    text = run.text(run.scaled(5_000_000))
    await run.post(ATTACKER, COMPLETIONS, {"prompt": text, "truncate_prompt_tokens": 16, "max_tokens": 1})


async def rejected_completion(run: AttackRun) -> None:
    """640 kB of text that are longer than the context."""
    await run.post(ATTACKER, COMPLETIONS, {"prompt": run.text(run.scaled(640_000)), "max_tokens": 1})


async def rejected_chat(run: AttackRun) -> None:
    """The same as a message."""
    messages = [{"role": "user", "content": run.text(run.scaled(640_000))}]
    await run.post(ATTACKER, CHAT, {"messages": messages, "max_tokens": 1})


async def stop_token_ids(run: AttackRun) -> None:
    """128 answers with 500,000 stop tokens, of which most are duplicates."""
    token_ids = [run.rng.randrange(VOCABULARY) for _ in range(run.scaled(500_000))]
    await run.post(ATTACKER, COMPLETIONS, {"prompt": "x", "n": 128, "max_tokens": 1, "stop_token_ids": token_ids})


async def allowed_token_ids(run: AttackRun) -> None:
    """128 answers with 500,000 allowed tokens, of which most are duplicates."""
    token_ids = [run.rng.randrange(VOCABULARY) for _ in range(run.scaled(500_000))]
    await run.post(ATTACKER, COMPLETIONS, {"prompt": "x", "n": 128, "max_tokens": 1, "allowed_token_ids": token_ids})


async def many_answers(run: AttackRun) -> None:
    """20 calls of 500 bytes with 16 prompts and 128 answers to each."""
    count = run.scaled(20)
    bodies = [{"prompt": [f"{call} {at} x" for at in range(16)], "n": 128, "max_tokens": 4} for call in range(count)]
    await run.post_all(ATTACKER, COMPLETIONS, bodies)


def slow_schema(index: int, num_patterns: int) -> Body:
    """A string that matches many patterns: 400 of them take longer than a compilation may."""
    return {"allOf": [{"type": "string", "pattern": f".*{index}x{at}.*"} for at in range(num_patterns)]}


def _structured(schema: Body) -> Body:
    return {
        "messages": [{"role": "user", "content": "Answer."}],
        "max_tokens": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }


async def slow_schemas(run: AttackRun) -> None:
    """Ten slow schemas at a time, beside ten simple ones of the other key, one after the other."""
    indices, is_over = itertools.count(), False

    async def attack() -> None:
        while not is_over:
            await run.post(ATTACKER, CHAT, _structured(slow_schema(next(indices), run.scaled(400))))

    attacks = asyncio.gather(*(attack() for _ in range(10)))
    await asyncio.sleep(0.5)
    for index in range(10):
        simple = {"type": "object", "properties": {f"a{index}": {"type": "boolean"}}, "required": [f"a{index}"]}
        await run.post(OTHER, CHAT, _structured(simple))
    is_over = True
    await attacks


async def beams(run: AttackRun) -> None:
    """One call with 32 beams while 40 requests of the other key run: how long a later short request of it waits."""
    length = run.scaled(200)
    running = [{"prompt": f"{index} x", "max_tokens": length, "ignore_eos": True} for index in range(40)]
    others = asyncio.create_task(run.post_all(OTHER, COMPLETIONS, running))
    await asyncio.sleep(3.0 * min(1.0, run.size))
    search = {"prompt": "Once", "n": 32, "use_beam_search": True, "max_tokens": run.scaled(64), "ignore_eos": True}
    attack = asyncio.create_task(run.post(ATTACKER, COMPLETIONS, search))
    await asyncio.sleep(1.0 * min(1.0, run.size))
    later = AttackRun(run.clients, run.bound, run.size, run.rng)
    await later.post(OTHER, COMPLETIONS, {"prompt": "A short one", "max_tokens": 1})
    await asyncio.gather(others, attack)
    run.calls[OTHER] = later.calls[OTHER]


async def beam_logprobs(run: AttackRun) -> None:
    """Eight beams of 512 tokens with 20 logprobs at each: one answer with 82,000 logprobs."""
    body = {"prompt": "Once", "n": 8, "use_beam_search": True, "max_tokens": run.scaled(512), "logprobs": 20}
    await run.post(ATTACKER, COMPLETIONS, {**body, "ignore_eos": True})


async def prompt_logprobs(run: AttackRun) -> None:
    """20 logprobs at each of 7,000 tokens of a prompt."""
    prompt = [run.rng.randrange(1000, VOCABULARY) for _ in range(run.scaled(7000))]
    await run.post(ATTACKER, COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 20})


ATTACKS: Final[dict[str, Callable[[AttackRun], Awaitable[None]]]] = {
    "nothing": nothing,
    "5 MB, truncated": truncated_prompt,
    "640 kB, a 400": rejected_completion,
    "640 kB of chat, a 400": rejected_chat,
    "500,000 stop tokens": stop_token_ids,
    "500,000 allowed tokens": allowed_token_ids,
    "20 x 16 x 128 answers": many_answers,
    "ten slow schemas": slow_schemas,
    "32 beams": beams,
    "logprobs of beams": beam_logprobs,
    "logprobs of a prompt": prompt_logprobs,
}


# -- measurement ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttackResult:
    """What an attack has done to the other callers, and what it has used."""

    seconds: float
    report: VictimReport
    usage: Usage
    calls: dict[str, CallTimes]

    def figures(self) -> dict[str, Any]:
        """The figures for JSON."""
        return {
            "seconds": round(self.seconds, 3),
            "largest_gap_s": round(self.report.largest_gap, 3),
            "largest_health_s": round(self.report.largest_health, 3),
            "stream_failures": self.report.failures,
            **self.usage.figures(),
            **{key: calls.figures() for key, calls in self.calls.items() if calls.seconds},
        }


def measure(name: str, options: argparse.Namespace, rng: random.Random) -> AttackResult:
    """Run an attack on a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        secrets = write_keys(keys, (ATTACKER, OTHER))
        serve = ("--api-key-file", str(keys), *options.serve_options)
        with (
            server_process(*serve, python=options.server_python) as server,
            victim_beside(server.url, secrets[OTHER], options.stream_tokens) as victim,
        ):
            asyncio.run(_warm_up(server.url, secrets))
            victim.report_after(WARM_UP_GAPS)
            return asyncio.run(_measure(ATTACKS[name], server, victim, secrets, options, rng))


async def _warm_up(url: str, secrets: dict[str, str]) -> None:
    """Make the calls that import modules and start processes at first use."""
    async with bearer_client(url, secrets[OTHER]) as client:
        for path, body in (
            (COMPLETIONS, {"prompt": ["x", "y"], "n": 2, "max_tokens": 2, "stop_token_ids": [3]}),
            (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "logprobs": True}),
            (CHAT, _structured({"type": "object", "properties": {}})),
        ):
            await client.post(path, json=body)


async def _measure(
    attack: Callable[[AttackRun], Awaitable[None]],
    server: ServerProcess,
    victim: VictimProcess,
    secrets: dict[str, str],
    options: argparse.Namespace,
    rng: random.Random,
) -> AttackResult:
    clients = {key: bearer_client(server.url, secret, timeout=600.0) for key, secret in secrets.items()}
    run = AttackRun(clients, options.bound, options.size, rng)
    try:
        victim.reset()
        with server.measured() as usage:
            started = time.perf_counter()
            await attack(run)
            seconds = time.perf_counter() - started
            report = await asyncio.to_thread(victim.report_after, 1)
    finally:
        for client in clients.values():
            await client.aclose()
    return AttackResult(seconds, report, usage, run.calls)


# -- result --------------------------------------------------------------------------------------------------------


def results_table(results: dict[str, list[AttackResult]]) -> Table:
    """A row for each attack, with the median of its repeats; the delays are the largest ones of all repeats."""
    table = Table(title="The largest delays of the other callers, and what the calls of the attacker use")
    columns = (
        "attack",
        "status",
        "s",
        "gap, s",
        "/health, s",
        "CPU s: HTTP",
        "engine",
        "MiB: HTTP",
        "engine",
        "other key",
    )
    for name in columns:
        table.add_column(name, justify="left" if name in ("attack", "other key") else "right")
    for name, runs in results.items():
        rows = [run.figures() for run in runs]
        cells = [f"{statistics.median(row['seconds'] for row in rows):.1f}"]
        cells += [f"{max(row[key] for row in rows):.2f}" for key in ("largest_gap_s", "largest_health_s")]
        for key in ("http_cpu_s", "engine_cpu_s", "http_memory_mib", "engine_memory_mib"):
            cells.append(f"{statistics.median(row[key] for row in rows):.{1 if 'cpu' in key else 0}f}")
        table.add_row(name, _statuses(runs), *cells, _remarks(runs))
    return table


def _statuses(runs: Sequence[AttackResult]) -> str:
    total = sum((run.calls[ATTACKER].statuses for run in runs), Counter[int]())
    names = {LEFT: "left", BROKEN: "broken"}
    if len(total) == 1:
        return "".join(names.get(status, str(status)) for status in total)
    return ", ".join(f"{count} x {names.get(status, status)}" for status, count in sorted(total.items()))


def _remarks(runs: Sequence[AttackResult]) -> str:
    found = []
    if others := [run.calls[OTHER] for run in runs if run.calls[OTHER].seconds]:
        num_calls = sum(len(calls.seconds) for calls in others)
        slowest = max(max(calls.seconds) for calls in others)
        found.append(f"{sum(calls.num_failed for calls in others)} of {num_calls} failed, slowest {slowest:.1f} s")
    if restarts := sum(run.usage.engine_restarts for run in runs):
        found.append(f"engine restarted {restarts} times")
    if failures := sum(len(run.report.failures) for run in runs):
        found.append(f"{failures} streams failed")
    return "; ".join(found)


def run_attacks(options: argparse.Namespace) -> dict[str, list[AttackResult]]:
    """Run the chosen attacks; a round has each of them once."""
    results: dict[str, list[AttackResult]] = {name: [] for name in options.attack}
    for number in range(options.repeats):
        for name, runs in results.items():
            runs.append(measure(name, options, random.Random(f"{options.seed} {number} {name}")))
            print(f"{name}: {json.dumps(runs[-1].figures())}", file=sys.stderr)
    return results


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--attack", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), help="only these")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--bound", type=float, default=90.0, help="seconds after which a client disconnects")
    parser.add_argument("--size", type=float, default=1.0, help="multiplies the lengths of all large values")
    parser.add_argument("--stream-tokens", type=int, default=STREAM_TOKENS, help="length of the stream beside")
    parser.add_argument("--server-python", help="the interpreter of another checkout, whose code serves")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one line of JSON alone")
    parser.add_argument("serve_options", nargs="*", help="options of chairlift serve, after --")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    results = run_attacks(options)
    served = asdict(checkout_of(options.server_python))
    record = {"served": served, "attacks": {name: [run.figures() for run in runs] for name, runs in results.items()}}
    given = {**vars(options), "attack": len(options.attack), "serve_options": " ".join(options.serve_options)}
    parts: list[RenderableType] = [
        f"served: chairlift {served['version']} at {served['commit']}",
        results_table(results),
    ]
    print_result("caller_isolation", given, record, parts, as_json=options.json, width=150)
    if not options.json:
        print(json.dumps({"caller_isolation": record, "machine": asdict(machine_facts()), "seed": options.seed}))


if __name__ == "__main__":
    main()
