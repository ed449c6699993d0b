"""The benchmark of queue orders: its workload and table, and a run on a tiny model."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.queue_order import (
    TENANT_SHARES,
    Measured,
    at_rate,
    draw_requests,
    exceeds_bound,
    make_table,
    over_seeds,
    read_lengths,
    with_ratios,
)

from benchmarks import queue_order
from chairlift.slo import SLO


def test_lengths_of_a_trace_are_scaled_so_that_the_longest_request_fits(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    rows = ["2023-11-16 18:15:46.6,1000,30", "2023-11-16 18:15:47.6,100,10", "2023-11-16 18:15:48.6,2000,53"]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]), encoding="utf-8")
    assert read_lengths(trace, 4096) == [(1000, 30), (100, 10), (2000, 53)]
    assert read_lengths(trace, 207) == [(100, 3), (10, 1), (200, 5)]
    assert max(map(sum, read_lengths(None, 512))) <= 512


def test_seeds_draw_other_requests_and_policies_get_the_same() -> None:
    lengths = [(10, 5), (20, 9)]
    first, again, other = (draw_requests(lengths, 20, seed, 100, SLO(100)) for seed in (1, 1, 2))
    assert first == again != other
    tenants = Counter(request.tenant for request in draw_requests(lengths, 400, 1, 100, SLO(100)))
    assert [tenant for tenant, _ in tenants.most_common()] == list(TENANT_SHARES)
    arrivals = [request.arrival for request in at_rate(first, 5.0, 1)]
    assert arrivals == sorted(arrivals) == [request.arrival for request in at_rate(again, 5.0, 1)]


def test_the_table_has_the_ratio_to_the_first_policy() -> None:
    rows = [
        Measured("engine", 0.9, name, {"e2e_latency_mean": value}) for name, value in (("fcfs", 4.0), ("srpt", 2.0))
    ]
    rated = with_ratios(rows, "fcfs")
    assert [row.values["ratio"] for row in rated] == [1.0, 0.5]
    assert make_table("engine", rated).row_count == 2
    assert make_table("simulation", rated).row_count == 0


@pytest.mark.parametrize(("gaps", "shown", "is_exceeded"), [((5.0, 9.0), 9.0, False), ((9.0, 10.0), 9.0, True)])
def test_of_all_seeds_the_gap_nearest_to_its_bound_counts(
    gaps: tuple[float, float], shown: float, is_exceeded: bool
) -> None:
    runs = [
        {"service_gap": gap, "service_bound": bound, "goodput": gap}
        for gap, bound in zip(gaps, (8.0, 10.0), strict=True)
    ]
    values = over_seeds(runs)
    assert (values["service_gap"], values["goodput"]) == (shown, sum(gaps) / 2)
    assert exceeds_bound(Measured("engine", 0.9, "fair", values)) == is_exceeded
    assert not exceeds_bound(Measured("engine", 0.9, "fcfs", {"service_gap": 9.0}))


def test_the_bounds_of_fair_sharing_hold_on_an_engine(
    tiny_model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a load of 1,000 times the capacity all requests wait from the start, on any machine."""
    arguments = ["--model", str(tiny_model_dir("llama")), "--policies", "fcfs,mlfq,fair,dlpm"]
    arguments += ["--num-prompts", "120", "--max-num-seqs", "2", "--max-model-len", "256", "--loads", "1000"]
    monkeypatch.setattr(sys, "argv", ["queue_order", *arguments, "--seeds", "0", "--num-threads", "1", "--json"])
    assert queue_order.main() == 0
    rows = json.loads(capsys.readouterr().out)["results"]["rows"]
    assert len(rows) == 8
    gaps = {(row["source"], row["policy"]): row["service_gap"] for row in rows}
    bounds = {(row["source"], row["policy"]): row["service_bound"] for row in rows if "service_bound" in row}
    for source in ("engine", "simulation"):
        assert gaps[source, "fcfs"] > bounds[source, "fair"] >= gaps[source, "fair"]
        assert bounds[source, "dlpm"] >= gaps[source, "dlpm"]
    assert len(bounds) == 4
