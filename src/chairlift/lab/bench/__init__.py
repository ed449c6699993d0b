"""Benchmarks: run a workload on an engine, and report measurements that are computed from its events."""
