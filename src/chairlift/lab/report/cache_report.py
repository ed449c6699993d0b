"""Explains the prefix cache over an event log: what it missed by reason, and which prompts change needlessly."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from rich.console import RenderableType

from chairlift.core.kv.prefix_misses import WINDOW
from chairlift.events import EngineStarted, Event, PrefixMatched, RequestArrived
from chairlift.lab.tables import make_table, number
from chairlift.outputs import MissReason

MAX_SHOWN: Final = 20
"""The number of needless changes that are shown, those that cost most tokens."""


class Change(NamedTuple):
    """A kind of change between prompts of a client, whose text is computed again behind it."""

    model: str
    client: str
    text: str


@dataclass(slots=True)
class ChangeCost:
    """The tokens that a kind of change has cost, and the last request with it."""

    num_requests: int = 0
    num_tokens: int = 0
    example: str = ""


@dataclass(slots=True)
class CacheReport:
    """The prompt tokens of a log by where they came from, and those that were computed by reason.

    Attributes:
        missed: reason -> number of requests and of their computed prompt tokens.
    """

    num_requests: int = 0
    num_tokens: int = 0
    num_memory_tokens: int = 0
    num_disk_tokens: int = 0
    missed: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    changes: defaultdict[Change, ChangeCost] = field(default_factory=lambda: defaultdict(ChangeCost))

    def add(self, model: str, arrived: RequestArrived, match: PrefixMatched, other: RequestArrived | None) -> None:
        """Add the prompt of a request. `other` is the request that the match names, if any."""
        num_found = match.num_memory_tokens + match.num_disk_tokens
        self.num_requests += 1
        self.num_tokens += arrived.num_prompt_tokens
        self.num_memory_tokens += match.num_memory_tokens
        self.num_disk_tokens += match.num_disk_tokens
        if match.reason is None:
            return
        num_missed = arrived.num_prompt_tokens - num_found
        self.missed[match.reason].update(requests=1, tokens=num_missed)
        if (text := needless_change(arrived, match, other)) is not None:
            cost = self.changes[Change(model, arrived.tenant, text)]
            cost.num_requests += 1
            cost.num_tokens += match.num_repeated_tokens or num_missed
            cost.example = arrived.request_id + ("" if match.other_id is None else f" after {match.other_id}")

    def parts(self) -> Sequence[RenderableType]:
        """The report as text and tables."""
        if not self.num_requests:
            return ["No prompt was searched in a prefix cache."]
        num_computed = self.num_tokens - self.num_memory_tokens - self.num_disk_tokens
        shares = ", ".join(
            f"{count / self.num_tokens:.1%} {name}"
            for name, count in (
                ("from memory", self.num_memory_tokens),
                ("from disk", self.num_disk_tokens),
                ("computed", num_computed),
            )
        )
        reasons = [
            (reason, number(counts["requests"]), number(counts["tokens"]))
            for reason, counts in sorted(self.missed.items(), key=lambda item: -item[1]["tokens"])
        ]
        changes = sorted(self.changes.items(), key=lambda item: -item[1].num_tokens)[:MAX_SHOWN]
        rows = [
            (number(cost.num_tokens), number(cost.num_requests), change.client or "-", change.text, cost.example)
            for change, cost in changes
        ]
        columns = ["tokens", "requests", "client", "change", "example"]
        return [
            f"{self.num_requests:,} requests, {self.num_tokens:,} prompt tokens: {shares}",
            make_table("Why the rest was not cached", ["reason", "requests", "computed tokens"], rows=reasons),
            make_table("Needless changes", columns, rows=rows) if rows else "No prompt changes needlessly.",
            *(f"The chat template of {model} writes tools behind text that changes." for model in self._late_tools()),
        ]

    def _late_tools(self) -> list[str]:
        return sorted({change.model for change in self.changes if change.text == TOOLS_BEHIND})


TOOLS_BEHIND: Final = "text before the tools, which are computed again"


def needless_change(arrived: RequestArrived, match: PrefixMatched, other: RequestArrived | None) -> str | None:
    """What the client or the template should keep as in the earlier prompt; None if nothing changes needlessly."""
    if match.reason in (MissReason.OTHER_ADAPTER, MissReason.OTHER_SALT):
        return f"another {'LoRA adapter' if match.reason == MissReason.OTHER_ADAPTER else 'cache_salt or API key'}"
    if match.reason != MissReason.DIFFERS or match.position is None:
        return None
    start, earlier_start = arrived.tools_start, None if other is None else other.tools_start
    if other is not None and (start is None) != (earlier_start is None):
        return "drops the tools" if start is None else "adds tools"
    if start is not None and match.position < start:
        return TOOLS_BEHIND
    if match.num_moved_tokens > WINDOW:
        return "removes earlier text"
    first = match.position // WINDOW * WINDOW
    return f"other text at tokens {first:,} to {first + WINDOW - 1:,}"


def explain_cache(events: Iterable[Event]) -> CacheReport:
    """The report of a log; requests whose arrival it does not have are left out."""
    report, model = CacheReport(), ""
    arrived: dict[str, RequestArrived] = {}
    for event in events:
        if isinstance(event, EngineStarted):
            model = event.model
        elif isinstance(event, RequestArrived):
            arrived[event.request_id] = event
        elif isinstance(event, PrefixMatched) and (request := arrived.get(event.request_id)) is not None:
            report.add(model, request, event, arrived.get(event.other_id or ""))
    return report
