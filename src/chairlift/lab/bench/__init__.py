"""Benchmarks: drive an engine through a workload and report what its events say."""
