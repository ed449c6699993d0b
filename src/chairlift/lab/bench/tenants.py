"""Assigns the requests of a simulated workload to tenants, and measures the service of each tenant."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from rich.table import Table

from chairlift.config import parse_weights
from chairlift.events import Event, RequestArrived, RequestFinished
from chairlift.lab.metrics.percentile import Summary
from chairlift.lab.tables import make_table
from chairlift.lab.workload.request import WorkloadRequest


def parse_shares(text: str) -> dict[str, float]:
    """Parse "name=share,name=share" to a share of the requests for each tenant.

    Raises:
        ConfigError: see `parse_weights`.
    """
    return parse_weights(text, "tenants must have the form heavy=20,light=1 with shares above 0")


def with_tenants(workload: Sequence[WorkloadRequest], shares: Mapping[str, float], seed: int) -> list[WorkloadRequest]:
    """Draw a tenant for each request by the shares. A request that follows another one has the tenant of that one."""
    rng = random.Random(f"{seed} tenants")
    names, weights = list(shares), list(shares.values())
    tenant_of: dict[str, str] = {}
    for item in workload:
        (drawn,) = rng.choices(names, weights)
        tenant_of[item.request_id] = drawn if item.after is None else tenant_of.get(item.after, drawn)
    return [replace(item, tenant=tenant_of[item.request_id]) for item in workload]


@dataclass(slots=True)
class TenantFigures:
    """The finished requests of one tenant; times are in seconds."""

    num_requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttfts: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        ttft = Summary.from_values(self.ttfts)
        counts = asdict(self)
        del counts["ttfts"]
        return {**counts, "ttft": ttft and asdict(ttft)}


class TenantTally:
    """Counts finished requests and their tokens by tenant, from events."""

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
    """Create a table with one row for each tenant."""
    columns = ["tenant", "requests", "prompt tokens", "output tokens", "TTFT p50, s", "TTFT p99, s"]
    table = make_table("by tenant", columns)
    for tenant, served in sorted(figures.items()):
        ttft = Summary.from_values(served.ttfts)
        times = ["", ""] if ttft is None else [f"{ttft.p50:.3f}", f"{ttft.p99:.3f}"]
        counts = (served.num_requests, served.prompt_tokens, served.output_tokens)
        table.add_row(tenant, *(f"{count:,}" for count in counts), *times)
    return table
