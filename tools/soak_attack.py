"""Soak test with an attacker: costly calls of one API key for some minutes, beside the normal load of another key.

    python -m tools.soak_attack [--minutes 20] [--alone-minutes 3] [--attackers 2] [--seed N]
                                           [--server-python PYTHON]

A server with the default model and `--scheduling-policy fair` first answers the normal load of `soak_load.py` alone, of
which there is always more than it can answer. Then clients of the other key make the calls of
`benchmarks.caller_isolation` beside it, one kind after the other. Nothing may be lost: each call of the load is
answered, or refused with 429 or 503 and Retry-After, and equal requests get equal answers; each call of the attack has
an answer or an error of the documentation, or its client leaves; the engine is not restarted; and at the end the server
has no request. The output tokens per second of the load beside the attack must be at least 0.9 of its fair share, which
is half of those alone.

It prints a table and, as the last line, JSON. It ends with status 1 at the first failure.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import httpx
from benchmarks.caller_isolation import ATTACKER, ATTACKS, LEFT, OTHER, AttackRun, CallTimes
from benchmarks.common import bearer_client
from benchmarks.server_process import ServerProcess, Usage, checkout_of, server_process, write_keys
from rich.console import Console
from rich.table import Table

from support.plain_http import NO_TLS
from support.waiting import AMPLE_SECONDS
from tools.soak_load import SoakRequest, Tally, make_requests, run_load

MIN_SHARE: Final = 0.9
"""Of the fair share of the load, which is half of its throughput alone."""

BOUND_SECONDS: Final = 60.0
DOCUMENTED: Final = frozenset({LEFT, 200, 400, 408, 413, 429, 503})
"""The statuses that a call of the attack may have."""

ROUND_REQUESTS: Final = 500
ASCII: Final = range(17, 97)
"""Tokens of single printable characters in byte-level vocabularies. After a prompt that ends within a character, an
answer begins with the rest of it, which the constraint of the answer does not know."""


@dataclass(slots=True)
class AttackedSoak:
    """What a soak with an attack has measured.

    Attributes:
        tallies: the load alone, and beside the attack.
        seconds: the length of both parts.
        attack: the statuses of the attacker's calls by attack.
    """

    tallies: dict[str, Tally] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    attack: dict[str, Counter[int]] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)

    def throughput(self, part: str) -> float:
        """The output tokens per second of the load."""
        return self.tallies[part].output_tokens / self.seconds[part]

    @property
    def share(self) -> float:
        """The throughput of the load beside the attack, as a part of its fair share."""
        return self.throughput("attacked") / (self.throughput("alone") / 2)

    def check(self) -> None:
        """Check that nothing was lost."""
        wrong = {name: dict(found) for name, found in self.attack.items() if not DOCUMENTED.issuperset(found)}
        assert not wrong, f"statuses of the attack: {wrong}"
        assert self.usage.engine_restarts == 0, "the engine was restarted"
        assert self.tallies["attacked"].outcomes["answered"] > 0

    def figures(self) -> dict[str, Any]:
        """The figures for JSON."""
        statuses = {name: {str(key): count for key, count in found.items()} for name, found in self.attack.items()}
        parts = {
            part: {
                "seconds": round(self.seconds[part], 1),
                "output_tokens_per_s": round(self.throughput(part), 2),
                **tally.outcomes,
            }
            for part, tally in self.tallies.items()
        }
        return {**parts, "share_of_fair": round(self.share, 3), "attack": statuses, **self.usage.figures()}


def normal_requests(seed: int, has_time: Callable[[], bool]) -> Iterator[SoakRequest]:
    """The requests of the load while there is time. Those that the server must reject depend on other options."""
    for number in itertools.count():
        for request in make_requests(ROUND_REQUESTS, seed + number % 4):
            if not has_time():
                return
            if not request.is_rejected:
                prompt = [ASCII[token % len(ASCII)] for token in request.body["prompt"]]
                yield replace(request, body={**request.body, "prompt": prompt, "priority": 0})


async def attack_while(
    url: str, secret: str, has_time: Callable[[], bool], rng: random.Random, size: float, found: dict[str, Counter[int]]
) -> None:
    """Make the calls of one attack after the other; `found` receives their statuses."""
    names = [name for name in ATTACKS if name != "nothing"]
    async with bearer_client(url, secret, timeout=600.0) as client:
        while has_time():
            name = rng.choice(names)
            times = CallTimes()
            calls = {ATTACKER: times, OTHER: times}
            await ATTACKS[name](AttackRun({ATTACKER: client, OTHER: client}, BOUND_SECONDS, size, rng, calls))
            found.setdefault(name, Counter()).update(times.statuses)


async def soak(
    server: ServerProcess, secrets: dict[str, str], options: argparse.Namespace, size: float = 1.0
) -> AttackedSoak:
    """Run the load alone, and then beside the attack.

    Args:
        size: of the calls of the attack.
    """
    result = AttackedSoak()
    await _run_part(server, secrets[OTHER], options.seed, 0.1 * options.alone_minutes, Tally())  # not measured
    result.tallies["alone"] = tally = Tally()
    result.seconds["alone"] = await _run_part(server, secrets[OTHER], options.seed, options.alone_minutes, tally)
    result.tallies["attacked"] = tally = Tally(answers=tally.answers)
    with server.measured() as result.usage:
        end = time.monotonic() + 60 * options.minutes
        rngs = [random.Random(f"{options.seed} {index}") for index in range(options.attackers)]
        attacks = asyncio.gather(
            *(
                attack_while(server.url, secrets[ATTACKER], lambda: time.monotonic() < end, rng, size, result.attack)
                for rng in rngs
            )
        )
        result.seconds["attacked"] = await _run_part(server, secrets[OTHER], options.seed, options.minutes, tally)
        await attacks
    await _wait_until_idle(server.url, secrets)
    return result


async def _run_part(server: ServerProcess, secret: str, seed: int, minutes: float, tally: Tally) -> float:
    """Run the load for some minutes and wait for its answers; returns the seconds."""
    started = time.monotonic()
    requests = normal_requests(seed, lambda: time.monotonic() < started + 60 * minutes)
    await run_load(server.url, requests, tally, secret=secret, may_be_refused=True)
    return time.monotonic() - started


async def _wait_until_idle(url: str, secrets: dict[str, str]) -> None:
    """Wait until the server has no request of any key."""
    deadline = time.monotonic() + AMPLE_SECONDS
    for secret in secrets.values():
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=AMPLE_SECONDS, verify=NO_TLS) as client:
            while unfinished := (await client.get("/v1/requests")).raise_for_status().json()["data"]:
                assert time.monotonic() < deadline, f"not ended: {unfinished}"
                await asyncio.sleep(0.1)


def run(options: argparse.Namespace, *serve_options: str, size: float = 1.0) -> AttackedSoak:
    """Start a server and run the soak on it."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        secrets = write_keys(keys, (ATTACKER, OTHER))
        chosen = ("--api-key-file", str(keys), "--scheduling-policy", "fair", *serve_options)
        with server_process(*chosen, python=options.server_python) as server:
            return asyncio.run(soak(server, secrets, options, size))


def print_result(result: AttackedSoak, options: argparse.Namespace) -> None:
    """The tables, and a line of JSON."""
    console = Console(width=120)
    table = Table("load", "minutes", "output tokens/s", "outcomes", title="The normal load of one key")
    for part, tally in result.tallies.items():
        outcomes = ", ".join(f"{count} {what}" for what, count in sorted(tally.outcomes.items()) if count)
        table.add_row(part, f"{result.seconds[part] / 60:.1f}", f"{result.throughput(part):.1f}", outcomes)
    console.print(table)
    table = Table("attack", "statuses of its calls", title="The calls of the other key (0: the client has left)")
    for name, statuses in sorted(result.attack.items()):
        table.add_row(name, ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())))
    console.print(table)
    console.print(f"{result.share:.2f} of the fair share (at least {MIN_SHARE})")
    served = checkout_of(options.server_python)
    facts = {"served": f"{served.version} {served.commit}", "seed": options.seed}
    print(json.dumps({"soak_attack": result.figures(), **facts}))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="of the attack")
    parser.add_argument("--alone-minutes", type=float, default=3.0, help="of the load alone, before the attack")
    parser.add_argument("--attackers", type=int, default=2, help="clients that make attacks at the same time")
    parser.add_argument("--server-python", help="the interpreter of another checkout, whose code serves")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    result = run(options)
    print_result(result, options)
    result.check()
    assert result.share >= MIN_SHARE, f"{result.share:.2f} of the fair share; at least {MIN_SHARE}"


if __name__ == "__main__":
    main()
