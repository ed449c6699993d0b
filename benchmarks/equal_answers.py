"""Sends the same random calls to the servers of two checkouts, and compares the bytes of their answers.

    python -m benchmarks.equal_answers --before-python PYTHON [--calls 2000] [--seed 0] [--model MODEL] [--json]
                                       [-- SERVE OPTIONS]

The calls are completions and chats with random fields: lists of prompts, texts and token ids, up to 16 answers, beams,
truncation, logprobs, stop strings, stop tokens with duplicates, bad words, biases, streams. Some of them are rejected,
whose errors are compared as well. Each call that samples has a seed, so that its answer depends on nothing else; both
servers have one thread each, and answer several calls at a time.

Ids, times and the numbers of cached tokens, which depend on the order of the calls, are replaced before the comparison.
The chunks of a stream are joined: how many tokens a chunk has depends on the speed of the machine.

The script prints the number of calls and differences of each kind and, as the last line, JSON. The status is 1 if an
answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import httpx
from benchmarks.common import print_result
from benchmarks.server_process import checkout_of, server_process
from rich.console import RenderableType
from rich.table import Table

CONCURRENCY: Final = 6
MAX_SHOWN: Final = 20
WORDS: Final = (
    "Chairs",
    "never",
    "stop",
    "for",
    "a",
    "rider",
    "é",
    "漢字",
    "42",
    "{",
    "}",
    "?\n",
    "the",
    "next",
    "seat",
)
VARIABLE: Final = (
    (re.compile(rb'"id":"[^"]*"'), b'"id":""'),
    (re.compile(rb'"created":\d+'), b'"created":0'),
    (re.compile(rb'"cached_tokens":\d+'), b'"cached_tokens":0'),
    (re.compile(rb',"cache_miss":(null|\{[^}]*\})'), b""),
    (re.compile(rb'"timings":\{[^}]*\}'), b'"timings":{}'),
)
"""What differs between two answers to the same call, and its replacement."""

STREAMED_TEXTS: Final = ("text", "content", "reasoning_content", "arguments")
"""The fields of a chunk that hold a part of a text."""

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RandomCall:
    """A call, and the kinds that it is counted for."""

    path: str
    body: Body
    kinds: frozenset[str]


@dataclass(slots=True)
class Comparison:
    """The compared answers by kind, and those that differ.

    Attributes:
        differences: the call and both answers, of the first MAX_SHOWN.
    """

    calls: Counter[str] = field(default_factory=Counter)
    different: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    differences: list[dict[str, Any]] = field(default_factory=list)

    def add(self, call: RandomCall, before: bytes, after: bytes) -> None:
        """Compare two answers of the same call. Each begins with its status."""
        kinds = ["all", *call.kinds]
        self.calls.update(kinds)
        self.statuses[int(before[:3])] += 1
        if before == after:
            return
        self.different.update(kinds)
        if len(self.differences) < MAX_SHOWN:
            at = next((i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), 0)
            shown = (answer[max(0, at - 60) : at + 200].decode(errors="replace") for answer in (before, after))
            self.differences.append({"path": call.path, "body": call.body, "at": at, "answers": list(shown)})

    def figures(self) -> dict[str, Any]:
        """The figures for JSON."""
        return {
            "calls": self.calls["all"],
            "different": self.different["all"],
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "kinds": {kind: [count, self.different[kind]] for kind, count in sorted(self.calls.items())},
            "differences": self.differences,
        }


# -- calls ---------------------------------------------------------------------------------------------------------


def make_calls(count: int, seed: int) -> list[RandomCall]:
    """Random calls; the same ones for the same seed."""
    return [make_call(random.Random(f"{seed} {index}")) for index in range(count)]


def make_call(rng: random.Random) -> RandomCall:
    """A random call, of which a few are rejected."""
    is_chat = rng.random() < 0.35
    body: Body = {"max_tokens": rng.randint(1, 12), "seed": rng.getrandbits(32)}
    kinds = {"chat" if is_chat else "completion"}
    if is_chat:
        turns = ["user", "assistant", "user"] if rng.random() < 0.3 else ["user"]
        body["messages"] = [{"role": role, "content": _text(rng, 1, 30)} for role in turns]
    else:
        body["prompt"] = _prompt(rng, kinds)
    is_beams = rng.random() < 0.15
    if is_beams:
        kinds.add("beams")
        body |= {"use_beam_search": True, "n": rng.randint(1, 8)}
    elif rng.random() < 0.5:
        body["n"] = rng.choice((2, 3, 5, 8, 16))
        kinds.add("n > 1")
    _add_sampling(rng, body, kinds, is_beams and rng.random() < 0.9)
    _add_logprobs(rng, body, kinds, is_chat, is_beams)
    _add_ends(rng, body, kinds, is_beams and rng.random() < 0.9)
    if rng.random() < 0.2:
        body["truncate_prompt_tokens"] = rng.choice((-1, 1, 2, 5, 16, 40))
        kinds.add("truncated")
    if not is_beams and "prompt_logprobs" not in body and rng.random() < 0.35:
        body["stream"] = True
        kinds.add("stream")
    for name in ("timings", "return_token_ids", "add_special_tokens", "echo"):
        if rng.random() < 0.1:
            body[name] = True
            kinds.add(name)
    return RandomCall("/v1/chat/completions" if is_chat else "/v1/completions", body, frozenset(kinds))


def _text(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def _prompt(rng: random.Random, kinds: set[str]) -> Any:
    def one(has_text: bool) -> Any:
        return _text(rng, 1, 60) if has_text else [rng.randrange(3, 200) for _ in range(rng.randint(1, 60))]

    has_text = rng.random() < 0.7
    kinds.add("text" if has_text else "token ids")
    if rng.random() < 0.6:
        return one(has_text)
    kinds.add("list of prompts")
    return [one(has_text) for _ in range(rng.randint(2, 6))]


def _add_sampling(rng: random.Random, body: Body, kinds: set[str], is_plain: bool) -> None:
    body["temperature"] = rng.choice((0, 0.7, 1.3))
    if body["temperature"]:
        kinds.add("sampled")
    if is_plain:
        return
    for name, values in (
        ("top_k", (1, 5, 40)),
        ("top_p", (0.3, 0.9)),
        ("min_p", (0.05,)),
        ("repetition_penalty", (1.2,)),
        ("presence_penalty", (0.5,)),
        ("min_tokens", (1, 3)),
    ):
        if rng.random() < 0.12:
            body[name] = rng.choice(values)
            kinds.add(name)
    if rng.random() < 0.2:
        body["logit_bias"] = {str(rng.randrange(3, 200)): rng.choice((-100, -2, 3)) for _ in range(rng.randint(1, 50))}
        kinds.add("logit_bias")
    if rng.random() < 0.15:
        body["allowed_token_ids"] = [rng.randrange(3, 200) for _ in range(rng.randint(1, 300))]
        kinds.add("allowed_token_ids")


def _add_logprobs(rng: random.Random, body: Body, kinds: set[str], is_chat: bool, is_beams: bool) -> None:
    if rng.random() < 0.3:
        count = rng.choice((0, 1, 5, 20))
        body |= {"logprobs": True, "top_logprobs": count} if is_chat else {"logprobs": count}
        kinds.add("logprobs")
    if not is_beams and rng.random() < 0.1:
        body["prompt_logprobs"] = rng.choice((0, 3, 20))
        kinds.add("prompt_logprobs")


def _add_ends(rng: random.Random, body: Body, kinds: set[str], is_plain: bool) -> None:
    if rng.random() < 0.3:
        token_ids = [rng.randrange(3, 200) for _ in range(rng.randint(1, 60))]
        body["stop_token_ids"] = token_ids + rng.choices(token_ids, k=rng.randint(0, 60))
        kinds.add("stop_token_ids")
    if rng.random() < 0.3:
        body["ignore_eos"] = True
        kinds.add("ignore_eos")
    if is_plain:
        return
    if rng.random() < 0.2:
        body["stop"] = rng.sample(("e", " the", "s ", "\n", "ing", "é"), rng.randint(1, 3))
        kinds.add("stop")
    if rng.random() < 0.2:
        body["bad_words"] = rng.choices((*WORDS[:8], "and", "I", "to be"), k=rng.randint(1, 12))
        kinds.add("bad_words")


# -- answers -------------------------------------------------------------------------------------------------------


def normalized(status: int, content: bytes) -> bytes:
    """An answer with its status, without what differs between two answers to the same call."""
    if content.startswith((b"data: ", b":")):  # A comment precedes the first chunk of a slow stream.
        content = joined_stream(content)
    for pattern, replacement in VARIABLE:
        content = pattern.sub(replacement, content)
    return b"%d %b" % (status, content)


def joined_stream(content: bytes) -> bytes:
    """The chunks of a stream as one JSON object: the parts of each choice are added up, other fields are of the end."""
    lines = [line.removeprefix(b"data: ") for line in content.split(b"\n") if line.startswith(b"data: ")]
    choices: dict[int, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for chunk in map(json.loads, (line for line in lines if line != b"[DONE]")):
        for choice in chunk.pop("choices", ()):
            choices[choice["index"]] = _sum(choices.get(choice["index"]), choice)
        rest |= chunk
    rest |= {"choices": [choices[index] for index in sorted(choices)], "is_done": lines[-1:] == [b"[DONE]"]}
    return json.dumps(rest, separators=(",", ":"), sort_keys=True).encode()


def _sum(total: Any, part: Any, name: str = "") -> Any:
    """Add a part of a streamed value to what came before it: texts and lists are appended, null changes nothing."""
    if total is None or part is None:
        return part if total is None else total
    if isinstance(part, dict):
        return {**total, **{key: _sum(total.get(key), value, key) for key, value in part.items()}}
    return total + part if isinstance(part, list) or name in STREAMED_TEXTS else part


async def _send(client: httpx.AsyncClient, call: RandomCall) -> bytes:
    response = await client.post(call.path, json=call.body)
    return normalized(response.status_code, response.content)


async def compare(urls: Sequence[str], calls: Sequence[RandomCall]) -> Comparison:
    """Send the calls to both servers, CONCURRENCY at a time, and compare the answers in their order."""
    clients = [httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) for url in urls]
    comparison, waiting = Comparison(), iter(enumerate(calls))

    async def work() -> None:
        for index, call in waiting:
            comparison.add(call, *await asyncio.gather(*(_send(client, call) for client in clients)))
            if (index + 1) % 100 == 0:
                print(f"{index + 1} of {len(calls)}, {comparison.different['all']} differ", file=sys.stderr)

    try:
        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    finally:
        for client in clients:
            await client.aclose()
    return comparison


def comparison_table(comparison: Comparison) -> Table:
    table = Table("kind", title="The same calls to both servers")
    for name in ("calls", "different"):
        table.add_column(name, justify="right")
    for kind, count in sorted(comparison.calls.items(), key=lambda item: -item[1]):
        table.add_row(kind, str(count), str(comparison.different[kind]))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--before-python", required=True, help="the interpreter of the other checkout")
    parser.add_argument("--after-python", help="the interpreter of the second checkout; this one by default")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="in place of the default model")
    parser.add_argument("--json", action="store_true", help="print one line of JSON alone")
    parser.add_argument("serve_options", nargs="*", help="options of chairlift serve, after --")
    given = parser.parse_args()
    model = [] if given.model is None else [given.model]
    options = [*model, "--num-threads", "1", "--seed", "0", "--max-model-len", "1024", *given.serve_options]
    with (
        server_process(*options, python=given.before_python) as before,
        server_process(*options, python=given.after_python) as after,
    ):
        comparison = asyncio.run(compare((before.url, after.url), make_calls(given.calls, given.seed)))
    pythons = {"before": given.before_python, "after": given.after_python}
    served = {side: asdict(checkout_of(python)) for side, python in pythons.items()}
    record = {"served": served, **comparison.figures()}
    parts: list[RenderableType] = [f"{side}: {code['version']} at {code['commit']}" for side, code in served.items()]
    parts += [comparison_table(comparison), *(json.dumps(each) for each in comparison.differences)]
    shown = {**vars(given), "serve_options": " ".join(given.serve_options)}
    print_result("equal_answers", shown, record, parts, as_json=given.json)
    if not given.json:
        print(json.dumps({"equal_answers": record, "seed": given.seed}))
    return 1 if comparison.different else 0


if __name__ == "__main__":
    sys.exit(main())
