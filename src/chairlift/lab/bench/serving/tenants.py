"""A load of several tenants: whose each request is, and what each of them got."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from rich.table import Table

from chairlift.errors import ConfigError
from chairlift.events import Event, RequestArrived, RequestFinished
from chairlift.lab.metrics.percentile import Summary
from chairlift.lab.workload.request import WorkloadRequest


def parse_shares(text: str) -> dict[str, float]:
    """The shares in "name=share,name=share"; raises ConfigError."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _equals, number = part.partition("=")
        try:
            share = float(number)
        except ValueError:
            share = math.nan
        if not name or name in shares or not 0 < share < math.inf:
            raise ConfigError(f"tenants must be like heavy=20,light=1, with shares > 0, got {part!r} in {text!r}")
        shares[name] = share
    return shares


def with_tenants(workload: Sequence[WorkloadRequest], shares: Mapping[str, float], seed: int) -> list[WorkloadRequest]:
    """The same requests, each drawn for a tenant by the shares; whoever comes after another one has its tenant."""
    rng = random.Random(f"{seed} tenants")
    names, weights = list(shares), list(shares.values())
    tenant_of: dict[str, str] = {}
    for item in workload:
        (drawn,) = rng.choices(names, weights)
        tenant_of[item.request_id] = drawn if item.after is None else tenant_of.get(item.after, drawn)
    return [replace(item, tenant=tenant_of[item.request_id]) for item in workload]


@dataclass(slots=True)
class TenantFigures:
    """What one tenant got; times in seconds."""

    num_requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttfts: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        ttft = Summary.from_values(self.ttfts)
        counts = {"num_requests": self.num_requests, "prompt_tokens": self.prompt_tokens}
        return {**counts, "output_tokens": self.output_tokens, "ttft": None if ttft is None else asdict(ttft)}


class TenantTally:
    """Adds up by tenant, from events."""

    def __init__(self) -> None:
        self.figures: dict[str, TenantFigures] = {}
        self._tenant_of: dict[str, str] = {}

    def emit(self, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self._tenant_of[event.request_id] = event.tenant
        elif isinstance(event, RequestFinished):
            figures = self.figures.setdefault(self._tenant_of.pop(event.request_id), TenantFigures())
            figures.num_requests += 1
            figures.prompt_tokens += event.num_prompt_tokens
            figures.output_tokens += event.num_output_tokens
            if event.first_token_time is not None:
                figures.ttfts.append(event.first_token_time - event.arrival_time)


def tenant_table(figures: Mapping[str, TenantFigures]) -> Table:
    """A line a tenant."""
    table = Table(title="by tenant", title_justify="left")
    table.add_column("tenant")
    for name in ("requests", "prompt tokens", "output tokens", "TTFT p50, s", "p99, s"):
        table.add_column(name, justify="right")
    for tenant, got in sorted(figures.items()):
        ttft = Summary.from_values(got.ttfts)
        times = ["", ""] if ttft is None else [f"{ttft.p50:.3f}", f"{ttft.p99:.3f}"]
        table.add_row(tenant, f"{got.num_requests:,}", f"{got.prompt_tokens:,}", f"{got.output_tokens:,}", *times)
    return table
