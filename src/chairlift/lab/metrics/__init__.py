"""Latencies, throughput and memory use of a finished run."""
