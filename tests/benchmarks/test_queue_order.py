"""The workload and the table of the benchmark of queue orders, without an engine."""

from __future__ import annotations

from pathlib import Path

from benchmarks.queue_order import Measured, at_rate, draw_requests, make_table, read_lengths, with_ratios

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
    assert len({request.tenant for request in first}) == 4
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
